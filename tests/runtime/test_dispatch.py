"""dispatch: the cut is balanced and whole, and what cannot be cut or joined says so."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tandem.data_proto import DataProto
from tandem.errors import ColumnError, RunError
from tandem.ports import Collect
from tandem.runtime.dispatch import balanced, gather, scatter
from tandem.types import Key, Metrics


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=30), parts=st.integers(1, 5))
def test_parts_hold_each_row_once_and_none_is_empty_or_overloaded(lengths: list[int], parts: int) -> None:
    if len(lengths) < parts:
        with pytest.raises(ColumnError, match=f"{len(lengths)} rows"):
            balanced(lengths, parts)
        return
    rows = balanced(lengths, parts)
    assert sorted(i for part in rows for i in part) == list(range(len(lengths)))
    assert all(part and part == sorted(part) for part in rows)
    loads = [sum(lengths[i] for i in part) for part in rows]
    assert max(loads) - min(loads) <= max(lengths)


@given(rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1, max_size=30), parts=st.integers(1, 5))
def test_rows_of_one_owner_stay_together(rows: list[tuple[int, int]], parts: int) -> None:
    lengths, owners = [length for length, _ in rows], [owner for _, owner in rows]
    if len(set(owners)) < parts:
        with pytest.raises(ColumnError, match=f"{len(set(owners))} groups"):
            balanced(lengths, parts, owners)
        return
    found = balanced(lengths, parts, owners)
    assert sorted(i for part in found for i in part) == list(range(len(rows)))
    homes = [{part for part, held in enumerate(found) for i in held if owners[i] == owner} for owner in set(owners)]
    assert all(len(home) == 1 for home in homes)
    loads = [sum(lengths[i] for i in part) for part in found]
    assert max(loads) - min(loads) <= max(sum(n for n, o in rows if o == owner) for owner in set(owners))


def test_a_handle_says_that_its_groups_stay_whole() -> None:
    keys = [Key("train", ordinal, member) for member in range(2) for ordinal in range(4)]
    data = DataProto.make(keys, [1, 2, 3, 4, 5, 6, 7, 8], token={"x": torch.zeros(36)})
    by_row = scatter((data.ref(),), {}, 4)
    assert any(len(args[0].groups) == 2 for args, _ in by_row)
    for args, kwargs in scatter((replace(data.ref(), unit="group"),), {"rows": data}, 4):
        assert len(args[0].groups) == 1
        assert args[0].keys == kwargs["rows"].keys
        assert args[0].unit == "group"
    assert gather([replace(data.ref(), unit="group")] * 1, Collect.CONCAT, None).unit == "group"
    halves = [replace(data.ref(), unit="group").select(part) for part in ([0, 1, 4, 5], [2, 3, 6, 7])]
    assert gather(halves, Collect.CONCAT, data.keys) == replace(data.ref(), unit="group")


def rows(*ordinals: int) -> DataProto:
    return DataProto.make([Key("train", i) for i in ordinals], [1] * len(ordinals), token={"x": torch.tensor(ordinals)})


def test_batches_of_one_call_are_cut_alike() -> None:
    calls = scatter((rows(0, 1, 2), "as it is"), {"ref": rows(0, 1, 2).ref()}, 2)
    for args, kwargs in calls:
        assert args[0].keys == kwargs["ref"].keys
        assert args[1] == "as it is"
    with pytest.raises(ColumnError, match="different keys"):
        scatter((rows(0, 1), rows(1, 0)), {}, 2)
    with pytest.raises(ColumnError, match="no DataProto"):
        scatter((1,), {}, 2)


def test_results_that_cannot_become_one_say_so() -> None:
    with pytest.raises(RunError, match=r"Metrics.*concat"):
        gather([Metrics(), Metrics()], Collect.CONCAT, None)
    with pytest.raises(RunError, match=r"int.*sum"):
        gather([1, 2], Collect.SUM, None)
    assert gather([None, None], Collect.SUM, None) is None
    assert gather([rows(1), rows(0)], Collect.CONCAT, None).keys == (Key("train", 1), Key("train", 0))
    assert gather([rows(1).ref(), rows(0).ref()], Collect.CONCAT, None).keys == (Key("train", 1), Key("train", 0))
