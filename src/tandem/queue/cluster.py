"""The TransferQueue of a cluster: MemoryQueue's books, with the rows' numbers in storage units on the nodes.

The ledger holds rows as shapes, which are tensors on the meta device, so that its rules are the same and what it hands out
says how large everything is. The numbers go where `Units` puts them, and whoever reads or writes a row, on whatever node,
does so there and asks the books only which rows and columns there are:

    put   ->  the units have the numbers  ->  the books have the shapes (others see the rows)
    get   ->  shapes from the books       ->  their numbers from the units
    write ->  the units have the numbers  ->  the books have the columns
    ack, drop, restore                    ->  the units let go

A snapshot holds whole rows, and is that of a MemoryQueue: a run may go on from it with another queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol, cast

from tandem.data_proto import DataProto
from tandem.errors import QueueError
from tandem.ports import Consumer, Lease, TransferQueue
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.types import GroupKey, Key, Metrics, PolicyRef

_UNITS = "units"  # of meta_info: who has the numbers of these shapes


class Units(Protocol):
    """Where the numbers of rows lie, by key and column. Pickles as what finds them from elsewhere.

    Every call raises WorkerError where a unit is gone, and StalledError, with its name, for one that does not answer.
    """

    async def put(self, rows: DataProto) -> None:
        """Keeps the tensor columns of these rows, beside or in place of what is kept of them."""
        ...

    async def get(self, shapes: DataProto) -> DataProto:
        """The rows of which these are the shapes. Raises QueueError for a row or column that is not kept."""
        ...

    async def forget(self, keys: Collection[Key]) -> None:
        """All that is kept of these rows is let go."""
        ...

    async def close(self) -> None:
        """The end of the units, and of all that they keep."""
        ...


class Books(MemoryQueue):
    """Implements ports.TransferQueue for `RowsApart`: rows come and go as shapes, but for `put`, which takes them whole.

    start: the units, which begin when the queue is used first.
    """

    def __init__(self, start: Callable[[], Awaitable[Units]], config: QueueConfig | None = None) -> None:
        super().__init__(config)
        self._start = start
        self._started: Units | None = None
        self._starting = asyncio.Lock()
        self._turn = asyncio.Lock()  # of those who change which rows are there, and of a save, which reads all of them
        self._arriving: dict[int, DataProto] = {}  # whole rows on their way to the units
        self._numbers = count()

    async def units(self) -> Units:
        async with self._starting:
            if self._started is None:
                self._started = await self._start()
            return self._started

    async def put(self, rows: DataProto) -> None:
        """From its first moment on a snapshot has these rows."""
        self._ledger.check_open(rows.keys)
        places = {key.place for key in rows.keys}
        if twice := places & {key.place for each in self._arriving.values() for key in each.keys}:
            raise QueueError(f"place {min(twice)} is being filled by another put: rows have one producer")
        clock = asyncio.get_running_loop().time
        began_s, number = clock(), next(self._numbers)
        self._arriving[number] = rows
        units = None
        try:
            units = await self.units()
            await units.put(rows)
            async with self._turn:
                await super().put(rows.to("meta"))
                units = None
        finally:
            del self._arriving[number]
            if units is not None:
                await units.forget(rows.keys)
        self._note_wait("put", clock() - began_s)

    async def write(self, rows: DataProto) -> None:
        async with self._turn:
            await super().write(rows)

    async def get(self, keys: Sequence[Key], columns: frozenset[str]) -> DataProto:
        return replace(await super().get(keys, columns), meta_info={_UNITS: await self.units()})

    async def ack(self, lease: Lease) -> None:
        async with self._turn:
            gone = self._ledger.ack(lease)
            self._changed()
            await (await self.units()).forget(gone)

    async def drop(self, places: Collection[Key], reason: str) -> None:
        """At once; who drops places and puts the rest of their group gives way to no other task between."""
        gone = self._ledger.drop(places, reason)
        self._changed()
        if gone:
            async with self._turn:
                await (await self.units()).forget(gone)

    async def save(self, directory: Path) -> None:
        """Fetches all rows; then it blocks while it writes, and gives way to no other task between the write and its return."""
        async with self._turn:
            units = await self.units()
            whole = [await units.get(block) for block in self._ledger.blocks]
            ledger, self._ledger = self._ledger, deepcopy(self._ledger)
            there = {key for block in ledger.blocks for key in block.keys}
            self._ledger.store([block.by_keys([key for key in block.keys if key in there]) for block in whole])
            for rows in self._arriving.values():
                with suppress(QueueError):  # dropped meanwhile: so will their put find
                    self._ledger.put(rows)
            try:
                await super().save(directory)
            finally:
                self._ledger = ledger

    async def restore(self, snapshot: str, directory: Path | None, policy: PolicyRef | None = None) -> None:
        async with self._turn:
            units = await self.units()
            before = {key for block in self._ledger.blocks for key in block.keys}
            await super().restore(snapshot, directory, policy)
            await units.forget(before)
            for block in self._ledger.blocks:
                await units.put(block)
                self._ledger.store([block.to("meta")])

    async def close(self) -> None:
        if self._started is not None:
            await self._started.close()


class RowsApart:
    """Implements ports.TransferQueue: asks `books` for all but the rows' numbers, which it reads and writes where they lie.

    books: a `Books`, or a client of one in another process.
    """

    def __init__(self, books: TransferQueue) -> None:
        self._books = books

    async def reserve(self, group: GroupKey, n: int) -> tuple[Key, ...]:
        return await self._books.reserve(group, n)

    async def put(self, rows: DataProto) -> None:
        await self._books.put(rows)

    async def write(self, rows: DataProto) -> None:
        if rows.keys:
            _, units = _apart(await self._books.get(rows.keys, frozenset()))
            await units.put(rows)
        await self._books.write(rows.to("meta"))

    async def take(
        self, consumer: Consumer, columns: frozenset[str], n: int, *, window: int = 0, lacking: frozenset[str] = frozenset()
    ) -> Lease:
        return await self._books.take(consumer, columns, n, window=window, lacking=lacking)

    async def release(self, lease: Lease) -> None:
        await self._books.release(lease)

    async def get(self, keys: Sequence[Key], columns: frozenset[str]) -> DataProto:
        shapes, units = _apart(await self._books.get(keys, columns))
        return await units.get(shapes)

    async def ack(self, lease: Lease) -> None:
        await self._books.ack(lease)

    async def drop(self, places: Collection[Key], reason: str) -> None:
        await self._books.drop(places, reason)

    async def save(self, directory: Path) -> None:
        await self._books.save(directory)

    async def commit(self, snapshot: str) -> None:
        await self._books.commit(snapshot)

    async def restore(self, snapshot: str, directory: Path | None, policy: PolicyRef | None = None) -> None:
        await self._books.restore(snapshot, directory, policy)

    def metrics(self) -> Metrics:
        return self._books.metrics()


class ClusterQueue(RowsApart):
    """The owner's end. books: what it serves to others."""

    def __init__(self, start: Callable[[], Awaitable[Units]], config: QueueConfig | None = None) -> None:
        self.books = Books(start, config)
        super().__init__(self.books)

    async def close(self) -> None:
        await self.books.close()


def _apart(found: DataProto) -> tuple[DataProto, Units]:
    return replace(found, meta_info={}), cast("Units", found.meta_info[_UNITS])
