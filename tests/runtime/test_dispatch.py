"""dispatch: the cut is balanced and whole, and what cannot be cut or joined says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tandem.data_proto import DataProto
from tandem.errors import ColumnError, RunError
from tandem.ports import Collect, Dispatch
from tandem.runtime.dispatch import balanced, checked, gather, scatter
from tandem.types import Key, Metrics


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=30), parts=st.integers(1, 5))
def test_parts_hold_each_row_once_and_none_is_overloaded(lengths: list[int], parts: int) -> None:
    rows = balanced(lengths, parts)
    assert len(rows) == parts
    assert sorted(i for part in rows for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in rows)
    loads = [sum(lengths[i] for i in part) for part in rows]
    assert max(loads) - min(loads) <= max(lengths)


@given(rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1, max_size=30), parts=st.integers(1, 5))
def test_rows_of_one_owner_stay_together(rows: list[tuple[int, int]], parts: int) -> None:
    lengths, owners = [length for length, _ in rows], [owner for _, owner in rows]
    found = balanced(lengths, parts, owners)
    assert sorted(i for part in found for i in part) == list(range(len(rows)))
    homes = [{part for part, held in enumerate(found) for i in held if owners[i] == owner} for owner in set(owners)]
    assert all(len(home) == 1 for home in homes)
    loads = [sum(lengths[i] for i in part) for part in found]
    assert max(loads) - min(loads) <= max(sum(n for n, o in rows if o == owner) for owner in set(owners))


def test_a_handle_says_that_its_groups_stay_whole() -> None:
    keys = [Key("train", ordinal, member) for member in range(2) for ordinal in range(4)]
    data = DataProto.make(keys, [1, 2, 3, 4, 5, 6, 7, 8], token={"x": torch.zeros(36)})
    by_row = scatter(Dispatch.SPLIT, (data.ref(),), {}, 4, 1)
    assert any(len(args[0].groups) == 2 for args, _ in by_row)
    whole = replace(data.ref(), unit="group")
    for args, kwargs in scatter(Dispatch.SPLIT, (whole,), {"rows": data}, 4, 1):
        assert len(args[0].groups) == 1
        assert args[0].keys == kwargs["rows"].keys
        assert args[0].unit == "group"
    halves = [whole.select(part) for part in ([0, 1, 4, 5], [2, 3, 6, 7])]
    assert gather(halves, Dispatch.SPLIT, Collect.CONCAT, 1, ((whole,), {})) == whole


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_a_realistic_batch_is_balanced_within_3_percent(parts: int) -> None:
    """64 groups of 8 answers whose lengths have a long tail (log-normal, 40 to 4,096 tokens)."""
    seeded = torch.Generator().manual_seed(0)
    lengths = (torch.randn(512, generator=seeded) * 0.8 + 6.2).exp().clamp(40, 4096).int().tolist()
    loads = [sum(lengths[i] for i in part) for part in balanced(lengths, parts)]
    assert max(loads) <= 1.03 * sum(loads) / parts


def test_rows_that_can_stay_together_do() -> None:
    assert balanced([4] * 8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert balanced([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert balanced([6, 5, 4, 5], 2) == [[0, 2], [1, 3]]  # neighbours: 11 and 9


def rows(*ordinals: int) -> DataProto:
    return DataProto.make([Key("train", i) for i in ordinals], [1] * len(ordinals), token={"x": torch.tensor(ordinals)})


def test_batches_of_one_call_are_cut_alike() -> None:
    calls = scatter(Dispatch.SPLIT, (rows(0, 1, 2), "as it is"), {"ref": rows(0, 1, 2).ref()}, 2, 1)
    assert len(calls) == 2
    for args, kwargs in calls:
        assert args[0].keys == kwargs["ref"].keys
        assert args[1] == "as it is"
    with pytest.raises(ColumnError, match="different keys"):
        scatter(Dispatch.SPLIT, (rows(0, 1), rows(1, 0)), {}, 2, 1)
    with pytest.raises(ColumnError, match="no DataProto"):
        scatter(Dispatch.SPLIT, (1,), {}, 2, 1)


def test_ranks_that_share_rows_get_one_call_and_count_once() -> None:
    batch = rows(0, 1, 2)
    calls = scatter(Dispatch.SPLIT, (batch,), {}, 4, 2)
    assert calls[0] is calls[1]
    assert calls[2] is calls[3]
    assert sorted(key for call in (calls[0], calls[2]) for key in call[0][0].keys) == sorted(batch.keys)
    parts = [call[0][0] for call in calls]
    assert gather(parts, Dispatch.SPLIT, Collect.CONCAT, 2, ((batch,), {})).keys == batch.keys
    counts = [Metrics.sum({"rows": len(part)}) for part in parts]
    assert gather(counts, Dispatch.SPLIT, Collect.SUM, 2, ((batch,), {}))["rows"].value == 3
    for size, replicas in ((3, 2), (2, 0), (2, 4)):
        with pytest.raises(RunError, match=f"{size} ranks"):
            checked(size, replicas)
    with pytest.raises(RunError, match="at least one"):
        checked(0, 1)


def test_results_that_cannot_become_one_say_so() -> None:
    def joined(results: list[Any], collect: Collect) -> Any:
        return gather(results, Dispatch.BROADCAST, collect, 1, ((), {}))

    with pytest.raises(RunError, match=r"Metrics.*concat"):
        joined([Metrics(), Metrics()], Collect.CONCAT)
    with pytest.raises(RunError, match=r"int.*sum"):
        joined([1, 2], Collect.SUM)
    assert joined([None, None], Collect.SUM) is None
    assert joined([rows(1), rows(0)], Collect.CONCAT).keys == (Key("train", 1), Key("train", 0))
    assert joined([rows(1).ref(), rows(0).ref()], Collect.CONCAT).keys == (Key("train", 1), Key("train", 0))
