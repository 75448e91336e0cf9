"""ClusterQueue: that the numbers are where the books say, no longer than they say, and that a snapshot is of one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.data_proto import DataProto
from tandem.errors import QueueError
from tandem.ports import Consumer, TransferQueue
from tandem.queue.cluster import ClusterQueue
from tandem.queue.fake import FakeUnits
from tandem.queue.memory import MemoryQueue
from tandem.types import GroupKey, Key

LEARNER = Consumer("learner")
TOKENS = frozenset({"tokens"})


def rows(ordinal: int, *members: int, value: int = 0) -> DataProto:
    keys = [Key("train", ordinal, member) for member in members]
    return DataProto.make(keys, [2] * len(keys), token={"tokens": torch.full((2 * len(keys),), value)})


async def filled(queue: TransferQueue, num: int = 2) -> None:
    for ordinal in range(num):
        await queue.reserve(GroupKey("train", ordinal), 2)
        await queue.put(rows(ordinal, 0, 1, value=ordinal))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_the_books_hold_no_numbers_and_know_how_many_bytes_there_are() -> None:
    async def scenario() -> None:
        queue = ClusterQueue(FakeUnits().start)
        await filled(queue)
        lease = await queue.take(LEARNER, TOKENS, 2)
        shapes = await queue.books.get(lease.ref.keys, TOKENS)
        assert shapes["tokens"].is_meta
        assert queue.metrics()["bytes"].value == 64

    run(scenario())


def test_what_is_consumed_dropped_or_undone_is_let_go() -> None:
    async def scenario() -> None:
        units = FakeUnits()
        queue = ClusterQueue(units.start)
        await filled(queue, 3)
        await queue.ack(await queue.take(LEARNER, TOKENS, 1))
        assert {key.ordinal for key in units.rows} == {1, 2}
        await queue.drop([Key("train", 1, 0)], "stale")
        assert sorted(units.rows) == [Key("train", 1, 1), Key("train", 2, 0), Key("train", 2, 1)]
        await queue.restore("", None)
        assert not units.rows

    run(scenario())


def test_a_refused_put_and_one_beside_another_leave_the_rows_as_they_are() -> None:
    async def scenario() -> None:
        units = FakeUnits()
        queue = ClusterQueue(units.start)
        await filled(queue, 1)
        with pytest.raises(QueueError, match="filled already"):
            await queue.put(rows(0, 1, value=9))
        await queue.reserve(GroupKey("train", 1), 1)
        slow = Slow(units, "put")
        queue = ClusterQueue(slow.start)
        await queue.reserve(GroupKey("train", 0), 1)
        first = asyncio.create_task(queue.put(rows(0, 0, value=1)))
        await slow.asked.wait()
        with pytest.raises(QueueError, match="one producer"):
            await queue.put(rows(0, 0, value=2))
        slow.go.set()
        await first
        assert (await queue.get([Key("train", 0)], TOKENS))["tokens"].tolist() == [1, 1]
        assert units.rows[Key("train", 0, 1)]["tokens"].tolist() == [0, 0]

    run(scenario())


def test_a_put_that_does_not_come_to_its_end_leaves_nothing_in_the_units() -> None:
    async def scenario() -> None:
        units = FakeUnits()
        slow = Slow(units, "put")
        queue = ClusterQueue(slow.start)
        await queue.reserve(GroupKey("train", 0), 2)
        cancelled, dropped = (asyncio.create_task(queue.put(rows(0, member))) for member in (0, 1))
        await slow.asked.wait()
        cancelled.cancel()
        await queue.drop([Key("train", 0, 1)], "abort")
        slow.go.set()
        for putting, error in ((cancelled, asyncio.CancelledError), (dropped, QueueError)):
            with pytest.raises(error):
                await putting
        assert not units.rows
        assert queue.metrics()["rows"].value == 0

    run(scenario())


def test_nobody_sees_a_row_before_the_units_have_it() -> None:
    async def scenario() -> None:
        slow = Slow(FakeUnits(), "put")
        queue = ClusterQueue(slow.start)
        await queue.reserve(GroupKey("train", 0), 1)
        taking = asyncio.create_task(queue.take(LEARNER, TOKENS, 1))
        putting = asyncio.create_task(queue.put(rows(0, 0)))
        await slow.asked.wait()
        assert queue.metrics()["rows"].value == 0
        assert not taking.done()
        slow.go.set()
        await putting
        assert len((await taking).ref.keys) == 1

    run(scenario())


def test_a_snapshot_is_of_one_moment_and_any_queue_goes_on_from_it(tmp_path: Path) -> None:
    """Rows come and go while the units are asked: what was put or dropped before the save returns is in it, as the group's producer
    takes it to be; what is acknowledged meanwhile is consumed after it.
    """

    async def scenario() -> None:
        slow = Slow(FakeUnits(), "get")
        queue = ClusterQueue(slow.start)
        await filled(queue)
        await queue.reserve(GroupKey("train", 2), 2)
        lease = await queue.take(LEARNER, TOKENS, 1)

        async def meanwhile() -> None:
            await slow.asked.wait()
            works = (queue.ack(lease), queue.put(rows(2, 0, value=7)), queue.drop([Key("train", 2, 1)], "abort"))
            others = [asyncio.create_task(work) for work in works]
            await asyncio.sleep(0.01)
            slow.go.set()
            await asyncio.gather(*others)

        others = asyncio.create_task(meanwhile())
        await queue.save(tmp_path)
        at_the_end = queue.metrics()["rows"].value
        await others
        assert (at_the_end, queue.metrics()["rows"].value) == (4, 3)

        for resumed in (MemoryQueue(), ClusterQueue(FakeUnits().start)):
            await resumed.restore("1", tmp_path)
            again = await resumed.take(LEARNER, TOKENS, 3)
            assert again.ref.keys[4:] == (Key("train", 2, 0),)
            assert (await resumed.get(again.ref.keys, TOKENS))["tokens"].tolist() == [0] * 4 + [1] * 4 + [7] * 2
        assert (await queue.get([Key("train", 1)], TOKENS))["tokens"].tolist() == [1, 1]

    run(scenario())


class Slow:
    """Implements Units: calls of `method` wait until `go` is set."""

    def __init__(self, units: FakeUnits, method: str) -> None:
        self._units, self._method = units, method
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def start(self) -> Slow:
        return self

    async def _wait(self, method: str) -> None:
        if method == self._method:
            self.asked.set()
            await self.go.wait()

    async def put(self, rows: DataProto) -> None:
        await self._wait("put")
        await self._units.put(rows)

    async def get(self, shapes: DataProto) -> DataProto:
        await self._wait("get")
        return await self._units.get(shapes)

    async def forget(self, keys: Collection[Key]) -> None:
        await self._units.forget(keys)

    async def close(self) -> None:
        await self._units.close()
