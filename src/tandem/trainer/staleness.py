"""How old the tokens of rows are, in versions, and which rows have some that are too old. Pure.

Ages count per token; the oldest counts for its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, split

from tandem.data_proto import DataProto
from tandem.types import BatchRef, Metrics, PolicyRef

Runs = Sequence[tuple[PolicyRef, int]]  # the policies of a row's sampled tokens, run-length coded


def too_old(ref: BatchRef, version: int, worst_age: int) -> list[int]:
    """The rows with a token that is older than `worst_age` where `version` is trained."""
    return [row for row, policy in enumerate(ref.policies) if policy is not None and version - policy.version > worst_age]


def without_old_tokens(rows: DataProto, version: int, worst_age: int) -> Tensor:
    """Column `mask` of these rows, bool [N], without the tokens that are older. A row that was masked as a whole stays so."""
    parts = list[Tensor]()
    lengths, runs_of_rows = cast("list[int]", rows.lengths.tolist()), cast("Sequence[Runs]", rows.objects("policy"))
    for mask_T, runs in zip(split(rows["mask"], lengths), runs_of_rows, strict=True):
        young = torch.tensor([version - policy.version <= worst_age for policy, _ in runs], dtype=torch.bool)
        young = young.repeat_interleave(torch.tensor([count for _, count in runs], dtype=torch.int64))
        part = mask_T.clone()
        if mask_T.any():
            part[mask_T] = young
        parts.append(part)
    return torch.cat(parts)


def histogram(policies: Iterable[PolicyRef | None], runs_of_rows: Iterable[Runs], version: int, ages: int) -> Metrics:
    """Rows by the age of their oldest token, tokens by theirs, of every age below `ages` and of those that there are.

    policies: the oldest of each row; a row without one was not sampled.
    """
    rows = Counter(version - policy.version for policy in policies if policy is not None)
    if not rows:
        return Metrics()
    tokens = Counter[int]()
    for runs in runs_of_rows:
        for policy, count in runs:
            tokens[version - policy.version] += count
    counts = {f"rows_of_age_{age}": rows[age] for age in sorted({*range(ages), *rows})}
    counts |= {f"tokens_of_age_{age}": tokens[age] for age in sorted({*range(ages), *tokens})}
    mean = Metrics.mean({"mean": sum(age * count for age, count in rows.items()) / rows.total()}, rows.total())
    return (Metrics.sum(counts) + mean + Metrics.max({"max": max(rows)})).prefixed("staleness")


def by_length(lengths: Iterable[int]) -> Metrics:
    """Rows that had tokens which were too old, by their length: `..._64` are those of 33 to 64 tokens."""
    buckets = Counter(1 << max(length - 1, 0).bit_length() for length in lengths)
    return Metrics.sum({f"staleness/too_old_rows_{bucket}": count for bucket, count in sorted(buckets.items())})
