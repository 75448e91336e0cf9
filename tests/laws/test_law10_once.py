"""Law 10 inside one process: in the lineage of a snapshot each sample is trained on at most once, and none is lost.

What a killed process leaves behind is the end-to-end part.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from tandem.data_proto import DataProto
from tandem.errors import QueueError
from tandem.ports import Consumer
from tandem.queue.fake import FakeQueue
from tandem.queue.ledger import Ledger
from tandem.types import GroupKey, Key, PolicyRef
from tests.laws.breaking import Breaker
from tests.trainer.world import World, world

TOKENS = frozenset({"tokens"})


async def _train(made: World, steps: int, snapshot_at: int | None = None, directory: Path | None = None) -> dict[str, Any]:
    """Trains for `steps` batches; gives their keys, and the source's state at the snapshot."""
    out: dict[str, Any] = {"keys": []}
    made.rollout.policy = made.source.policy
    async with aclosing(aiter(made.source)) as batches:
        for step in range(steps):
            batch = await anext(batches)
            out["keys"] += batch.keys
            made.rollout.policy = made.source.policy.next()
            await made.source.advance(made.source.policy.next())
            if step + 1 == snapshot_at and directory is not None:
                await made.queue.save(directory)
                out["state"] = made.source.state()
    return out


def check_a_resumed_run_trains_on_what_an_undisturbed_one_does_each_once() -> None:
    async def scenario(directory: Path) -> None:
        undisturbed = (await _train(world(algorithm="dapo"), 5))["keys"]
        assert len(set(undisturbed)) == len(undisturbed)
        lost = await _train(world(algorithm="dapo"), 4, snapshot_at=2, directory=directory)  # steps 3 and 4 die with it
        survivor = lost["keys"][: len(lost["keys"]) // 2]

        resumed = world(algorithm="dapo")
        await resumed.queue.restore("s", directory)
        resumed.source.restore(lost["state"])
        survivor += (await _train(resumed, 3))["keys"]
        assert survivor == undisturbed

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(scenario(Path(directory)))


def rows(*keys: Key) -> DataProto:
    return DataProto.make(keys, [1] * len(keys), token={"tokens": torch.tensor([key.ordinal for key in keys])})


async def _filled(num: int) -> FakeQueue:
    queue = FakeQueue()
    for ordinal in range(num):
        await queue.reserve(GroupKey("train", ordinal), 1)
        await queue.put(rows(Key("train", ordinal)))
    return queue


def check_what_was_not_acknowledged_is_offered_again_or_counted_as_dropped() -> None:
    async def scenario(directory: Path) -> None:
        queue = await _filled(5)
        learner = Consumer("learner")
        await queue.ack(await queue.take(learner, TOKENS, 1))
        await queue.take(learner, TOKENS, 1)  # leased, and never acknowledged
        await queue.drop([Key("train", 2)], "stale")
        await queue.save(directory)
        restored = FakeQueue()
        await restored.restore("s", directory)
        offered = (await restored.take(Consumer("learner", 1), TOKENS, 3)).ref.keys
        counted = restored.metrics()
        assert [key.ordinal for key in offered] == [1, 3, 4]
        assert counted["dropped/stale"].value == 1

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(scenario(Path(directory)))


def check_a_replaced_consumer_cannot_consume() -> None:
    async def scenario() -> None:
        queue = await _filled(1)
        old = await queue.take(Consumer("learner", 0), TOKENS, 1)
        new = await queue.take(Consumer("learner", 1), TOKENS, 1)
        assert new.ref.keys == old.ref.keys
        for lease in (old, new):
            try:
                await queue.ack(lease)
                assert lease is new, "both incarnations consumed the same rows"
            except QueueError:
                assert lease is old

    asyncio.run(scenario())


def check_no_ordinal_is_admitted_twice() -> None:
    async def scenario() -> None:
        queue = await _filled(2)
        await queue.ack(await queue.take(Consumer("learner"), TOKENS, 2))
        for ordinal in (0, 1):
            try:
                await queue.reserve(GroupKey("train", ordinal), 1)
            except QueueError:
                continue
            raise AssertionError(f"group train:{ordinal} was consumed and could be admitted again")

    asyncio.run(scenario())


def test_a_resumed_run_trains_on_what_an_undisturbed_one_does_each_once() -> None:
    check_a_resumed_run_trains_on_what_an_undisturbed_one_does_each_once()


def test_what_was_not_acknowledged_is_offered_again_or_counted_as_dropped() -> None:
    check_what_was_not_acknowledged_is_offered_again_or_counted_as_dropped()


def test_a_replaced_consumer_cannot_consume() -> None:
    check_a_replaced_consumer_cannot_consume()


def test_no_ordinal_is_admitted_twice() -> None:
    check_no_ordinal_is_admitted_twice()


_restore = Ledger.restore


def _restore_without_rows(self: Ledger, directory: Path) -> None:
    _restore(self, directory)
    self._groups, self._waiting, self._blocks = {}, {}, {}


def _restore_gate_alone(self: Any, state: Mapping[str, Any]) -> None:
    """Forgets which ordinal comes next."""
    name, incarnation, version = state["policy"]
    self.policy = PolicyRef(name, incarnation + 1, version)
    self._gate.restore(state["gate"], version)


BREAKERS = [
    Breaker(
        10,
        "acknowledged rows are offered again",
        "tandem.queue.ledger:Ledger.ack",
        lambda self, lease: self._release(lease),
        check_a_resumed_run_trains_on_what_an_undisturbed_one_does_each_once,
    ),
    Breaker(
        10,
        "a resumed source starts over",
        "tandem.trainer.intake:Intake.restore",
        _restore_gate_alone,
        check_a_resumed_run_trains_on_what_an_undisturbed_one_does_each_once,
    ),
    Breaker(
        10,
        "a snapshot forgets what was not consumed",
        "tandem.queue.ledger:Ledger.restore",
        _restore_without_rows,
        check_what_was_not_acknowledged_is_offered_again_or_counted_as_dropped,
    ),
    Breaker(
        10,
        "nobody is fenced off",
        "tandem.queue.ledger:Ledger.fence",
        lambda self, consumer: None,
        check_a_replaced_consumer_cannot_consume,
    ),
]
