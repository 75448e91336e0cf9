"""Cutting a batch of ragged rows into passes that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def micro_batches(lengths: Mapping[int, int], max_tokens: int, owners: Sequence[int] | None = None) -> list[list[int]]:
    """Rows by pass, shortest first; `lengths` gives each row's tokens.

    A pass of n rows whose longest has T tokens is padded to n T tokens, which is within `max_tokens`. Rows of similar
    length pass together, so that little is padding. A row above the bound passes alone. owners: whose each row is, where
    the rows of one owner pass together, in order; they do so alone where they are above the bound.
    """
    together: dict[int, list[int]] = {}
    for row in lengths:
        together.setdefault(row if owners is None else owners[row], []).append(row)
    passes: list[list[int]] = []
    for unit in sorted(together.values(), key=lambda unit: max(lengths[row] for row in unit)):
        longest = max(lengths[row] for row in unit)
        if passes and (len(passes[-1]) + len(unit)) * longest <= max_tokens:
            passes[-1] += unit
        else:
            passes.append(list(unit))
    return passes
