"""A batch of ragged rows handled as packed columns, against verl 0.9.1's padded DataProto: CPU milliseconds on one thread.

    pip install verl==0.9.1          # in an environment of its own, beside Tandem
    python benchmarks/data_proto.py  # the last line is JSON; exits with 1 where a ratio is below its floor

1,024 rows of 512 tokens in the mean and 2,048 at most (log-normal), six columns of tokens, one of rows, one of objects. Tandem
holds tokens alone, verl a table as wide as the longest row: the same facts, each in the library's own form, made before the
clock starts. The two take turns, in one process.
"""

from __future__ import annotations

import pickle
import sys
from importlib import import_module
from typing import Any

import numpy as np
import torch
from lines import Call, interleaved, publish, row

from tandem.data_proto import DataProto
from tandem.types import Key

ROWS, GROUP, MEAN, LONGEST, REPEATS = 1024, 8, 512, 2048, 15
FLOOR, STRETCH = 2.0, 5.0


def lengths() -> torch.Tensor:
    """Log-normal, cut at LONGEST, with one row that reaches it and a mean of MEAN."""
    drawn = np.exp(0.7 * np.random.default_rng(0).standard_normal(ROWS))
    low, high = 0.0, float(LONGEST)
    for _ in range(60):  # the scale at which what is left after the cut has the mean
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(scale * drawn, 1, LONGEST).mean() < MEAN else (low, scale)
    cut = np.clip(np.round(low * drawn), 1, LONGEST).astype(np.int64)
    cut[0] = LONGEST
    return torch.from_numpy(cut)


def both() -> tuple[DataProto, Any]:
    """The same rows in Tandem's form and in verl's."""
    seeded, sizes = torch.Generator().manual_seed(0), lengths()
    valid = torch.arange(LONGEST) < sizes[:, None]
    integers = {name: torch.randint(50_000, valid.shape, generator=seeded) * valid for name in ("input_ids", "responses")}
    floats = {name: torch.randn(valid.shape, generator=seeded) * valid for name in ("old_log_probs", "ref_log_prob", "advantages")}
    tables = {**integers, **floats, "response_mask": valid}
    rewards, answers = torch.rand(ROWS, generator=seeded), [str(i) for i in range(ROWS)]
    theirs = import_module("verl").DataProto.from_dict(
        tensors={**tables, "rewards": rewards}, non_tensors={"answer": np.array(answers, dtype=object)}
    )
    packed = {name: table[valid] for name, table in tables.items()}
    keys = [Key("train", i // GROUP, i % GROUP) for i in range(ROWS)]
    return DataProto.make(keys, sizes, token=packed, row={"rewards": rewards}, objects={"answer": answers}), theirs


def cases() -> dict[str, tuple[Call, Call]]:
    """Name: (verl's call, Tandem's call)."""
    ours, theirs = both()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    parts, their_parts, rows = ours.chunk(8), theirs.chunk(8), order.tolist()

    def reorder() -> None:  # in place, of an object that shares the tables
        type(theirs)(batch=theirs.batch, non_tensor_batch=dict(theirs.non_tensor_batch)).reorder(order)

    def there_and_back(batch: object) -> Call:
        return lambda: pickle.loads(pickle.dumps(batch, protocol=5))

    return {
        "concat of 8 parts": (lambda: theirs.concat(their_parts), lambda: DataProto.concat(parts)),
        "reorder": (reorder, lambda: ours.reorder(rows)),
        "pickle and back": (there_and_back(theirs), there_and_back(ours)),
    }


def main() -> int:
    try:
        verl = import_module("verl")
    except ImportError as error:
        print(f"the peer is missing ({error}): pip install verl==0.9.1 in an environment of its own", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    rows = list[dict[str, Any]]()
    for name, (peer, ours) in cases().items():
        ratios, theirs_s, ours_s = interleaved(peer, ours, REPEATS)
        times = {"verl_ms": round(1000 * theirs_s, 2), "tandem_ms": round(1000 * ours_s, 2)}
        rows.append(row(name, f"verl {verl.__version__}", ratios, FLOOR, STRETCH, **times))
    return publish("data_proto", rows)


if __name__ == "__main__":
    sys.exit(main())
