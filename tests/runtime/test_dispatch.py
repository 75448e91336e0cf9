"""dispatch: the cut is balanced and whole, and what cannot be cut or joined says so."""

from __future__ import annotations

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
