"""Ledger: what the contract suite cannot see from outside: sharing of rows, and that a refused call changes nothing."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tandem.data_proto import DataProto
from tandem.errors import QueueError
from tandem.ports import Consumer
from tandem.queue.ledger import Ledger
from tandem.types import GroupKey, Key

TOKENS = frozenset({"tokens"})
LEARNER = Consumer("learner")


def rows(*keys: Key) -> DataProto:
    return DataProto.make(keys, [2] * len(keys), token={"tokens": torch.arange(2 * len(keys))}, meta={"step": len(keys)})


def leased(num_groups: int = 2) -> tuple[Ledger, tuple[Key, ...]]:
    ledger = Ledger()
    for ordinal in range(num_groups):
        ledger.reserve(GroupKey("train", ordinal), 1)
        ledger.put(rows(Key("train", ordinal)))
    lease = ledger.lease(LEARNER, TOKENS, num_groups, 0)
    assert lease is not None
    return ledger, lease.ref.keys


def test_reading_and_writing_a_lease_copies_nothing() -> None:
    ledger, keys = leased()
    first = ledger.get(keys, TOKENS)["tokens"]
    score = torch.ones(2)
    ledger.write(DataProto.make(keys, [2, 2], row={"score": score}))
    again = ledger.get(keys, TOKENS | {"score"})
    assert again["tokens"].data_ptr() == first.data_ptr()
    assert again["score"].data_ptr() == score.data_ptr()


def test_facts_about_the_batch_that_was_put_do_not_travel_with_its_rows() -> None:
    ledger, keys = leased()
    assert ledger.get(keys, TOKENS).meta_info == {}


def test_a_lease_may_cut_a_block_that_holds_several_groups() -> None:
    ledger = Ledger()
    for ordinal in range(3):
        ledger.reserve(GroupKey("train", ordinal), 1)
    ledger.put(rows(*(Key("train", ordinal) for ordinal in range(3))))
    first = ledger.lease(LEARNER, TOKENS, 2, 0)
    assert first is not None
    ledger.ack(first)
    assert ledger.get((Key("train", 2),), TOKENS)["tokens"].tolist() == [4, 5]
    assert ledger.metrics()["bytes"].value == 16


def test_a_refused_call_changes_nothing() -> None:
    ledger = Ledger()
    ledger.reserve(GroupKey("train", 0), 2)
    with pytest.raises(QueueError):
        ledger.put(rows(Key("train", 0, 0), Key("train", 0, 7)))
    with pytest.raises(QueueError):
        ledger.drop([Key("train", 0, 0), Key("train", 0, 7)], "abort")
    ledger.put(rows(Key("train", 0, 0), Key("train", 0, 1)))
    assert "dropped/abort" not in ledger.metrics()


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["admit", "fill", "drop", "take", "ack", "save", "restore"]), st.integers(0, 5))))
def test_each_row_is_consumed_at_most_once_in_any_surviving_history(
    moves: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A model of the queue is three sets: offered, leased, consumed. A restore takes `consumed` back to the save's."""
    ledger = Ledger()
    directory: Path | None = None
    admitted = 0
    consumed: set[Key] = set()
    saved: set[Key] = set()
    leases = []
    for move, choice in moves:
        open_places = sorted(place for group in ledger._groups.values() for place in group.open)
        match move:
            case "admit":
                ledger.reserve(GroupKey("train", admitted), 1 + choice % 3)
                admitted += 1
            case "fill" if open_places:
                ledger.put(rows(open_places[choice % len(open_places)]))
            case "drop" if open_places:
                ledger.drop([open_places[choice % len(open_places)]], "abort")
            case "take":
                lease = ledger.lease(LEARNER, TOKENS, 1, choice)
                if lease is not None:
                    assert not consumed & set(lease.ref.keys)
                    assert not {key for other in leases for key in other.ref.keys} & set(lease.ref.keys)
                    leases.append(lease)
            case "ack" if leases:
                lease = leases.pop(choice % len(leases))
                ledger.ack(lease)
                consumed |= set(lease.ref.keys)
            case "save":
                directory = tmp_path_factory.mktemp("queue")
                ledger.save(directory)
                saved = set(consumed)
            case "restore" if directory is not None:
                ledger.restore(directory)
                consumed, leases = set(saved), []
                admitted = 1 + ledger._last.get("train", -1)
            case _:
                pass
