"""The TransferQueue of one process: rows stay where they are, and the calls hand out references to them.

Waiting is pushed, not polled: whoever changes the queue wakes those who wait. A call that need not wait gives way to no other
task. Acknowledged rows are let go at once,
since a save holds whole rows and does not need the queue to keep them; `commit` therefore has nothing to do. It does
not outlive its process except through `save`, which the snapshot store makes atomic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import torch

from tandem import stacks
from tandem.data_proto import DataProto, Join
from tandem.errors import QueueError, StalledError
from tandem.ports import Consumer, Lease
from tandem.queue.ledger import Ledger
from tandem.types import GroupKey, Key, Metric, Metrics, PolicyRef

T = TypeVar("T")


@dataclass(frozen=True)
class QueueConfig:
    """name: memory, which lives as long as its process and is saved with each snapshot; durable, whose finished groups outlive the
    process, in the directory of the run (rows of a dataset, which are made again from it, stay in memory); ray, which is memory
    with the rows' columns spread over the nodes of a Ray cluster (an extra: `transferqueue`).
    max_groups: groups that may be in the queue at once, leased ones included; `reserve` waits for room.
    stall_limit_s: how long `take` and `reserve` wait while nothing at all changes; longer than the slowest group takes.
    """

    SHORTHAND: ClassVar[str] = "name"

    name: Literal["memory", "durable", "ray"] = "memory"
    max_groups: int = 4096
    stall_limit_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_groups < 1:
            raise ValueError(f"max_groups must be at least 1, got {self.max_groups}")
        if not self.stall_limit_s >= 0:
            raise ValueError(f"stall_limit_s must not be negative, got {self.stall_limit_s}")


class MemoryQueue:
    """Implements ports.TransferQueue; see the module's docstring.

    join: makes one column of those of a lease's rows, in memory that can be shown to workers elsewhere without a copy.
    """

    def __init__(self, config: QueueConfig | None = None, *, join: Join = torch.cat) -> None:
        self._config = config or QueueConfig()
        self._join = join
        self._waited: dict[str, tuple[float, int]] = {}  # seconds and calls, by method, since metrics were asked for
        self._noted = Metrics()
        self._next_change = asyncio.Event()
        self._last_change_s = 0.0

    @cached_property
    def _ledger(self) -> Ledger:
        return self._begin()

    def _begin(self) -> Ledger:
        """The books when the queue is used first."""
        return Ledger(self._join)

    async def reserve(self, group: GroupKey, n: int) -> tuple[Key, ...]:
        def room() -> bool | None:
            return True if group in self._ledger or self._ledger.num_groups < self._config.max_groups else None

        await self._wait(
            "reserve", room, lambda: f"group {group} waits for room in the queue (max_groups {self._config.max_groups})"
        )
        places = self._ledger.reserve(group, n)
        self._changed()
        return places

    async def put(self, rows: DataProto) -> None:
        self._ledger.put(rows)
        self._changed()

    async def write(self, rows: DataProto) -> None:
        self._ledger.write(rows)
        self._changed()

    async def take(
        self, consumer: Consumer, columns: frozenset[str], n: int, *, window: int = 0, lacking: frozenset[str] = frozenset()
    ) -> Lease:
        if not 1 <= n <= self._config.max_groups:
            raise QueueError(f"consumer {consumer.name!r} asks for {n} groups of a queue that holds {self._config.max_groups}")
        if window < 0:
            raise QueueError(f"consumer {consumer.name!r} asks for a window of {window} groups; it starts at 0")

        def lease() -> Lease | None:
            self._ledger.fence(consumer)
            if lacking:
                return self._ledger.lend(consumer, columns, lacking, n)
            return self._ledger.lease(consumer, columns, n, window)

        def who() -> str:
            wanted = f"{n} whole groups with columns {', '.join(sorted(columns))}"
            if lacking:
                wanted = f"whole groups that lack {' or '.join(sorted(lacking))}"
            return f"consumer {consumer.name!r} (incarnation {consumer.incarnation}) waits for {wanted}"

        found = await self._wait("take", lease, who, columns)
        self._changed()
        return found

    async def release(self, lease: Lease) -> None:
        self._ledger.release(lease)
        self._changed()

    async def get(self, keys: Sequence[Key], columns: frozenset[str]) -> DataProto:
        return self._ledger.get(keys, columns)

    async def ack(self, lease: Lease) -> None:
        self._ledger.ack(lease)
        self._changed()

    async def drop(self, places: Collection[Key], reason: str) -> None:
        self._ledger.drop(places, reason)
        self._changed()

    async def save(self, directory: Path) -> None:
        """Blocks while it writes, and gives way to no other task between the write and its return."""
        self._ledger.save(directory)

    async def commit(self, snapshot: str) -> None:
        """Nothing to let go: see the module's docstring."""

    async def restore(self, snapshot: str, directory: Path | None, policy: PolicyRef | None = None) -> None:
        if directory is None:
            self._ledger = Ledger(self._join)
        else:
            ledger: Ledger = vars(self).get("_ledger", Ledger(self._join))
            ledger.restore(directory)
            self._ledger = ledger
        self._changed()

    async def close(self) -> None:
        """Nothing to put away."""

    def metrics(self) -> Metrics:
        waited = Metrics({f"{call}_time_s": Metric(seconds, calls) for call, (seconds, calls) in self._waited.items()})
        noted, self._noted, self._waited = self._noted, Metrics(), {}
        return self._ledger.metrics() + waited + noted

    def _note_wait(self, call: str, seconds: float) -> None:
        total, calls = self._waited.get(call, (0.0, 0))
        self._waited[call] = total + seconds, calls + 1

    def _changed(self) -> None:
        """Everybody who waits looks again, once, however often it changes before they do."""
        self._last_change_s = asyncio.get_running_loop().time()
        self._next_change.set()
        self._next_change = asyncio.Event()

    async def _wait(
        self, call: str, look: Callable[[], T | None], who: Callable[[], str], columns: frozenset[str] = frozenset()
    ) -> T:
        """Until `look` finds something. Raises StalledError after `stall_limit_s` in which nothing changed."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while (found := look()) is None:
            left_s = max(began_s, self._last_change_s) + self._config.stall_limit_s - clock()
            if left_s <= 0:
                raise StalledError(
                    f"{who()} and nothing changed for {self._config.stall_limit_s:g} s: {self._ledger.describe(columns)}. "
                    f"Look at who fills or consumes these groups, or raise stall_limit_s if they are merely slow. "
                    f"Where its process stands:\n{stacks.of_tasks()}"
                )
            try:
                async with asyncio.timeout(left_s):
                    await self._next_change.wait()
            except TimeoutError:
                continue
        self._note_wait(call, clock() - began_s)
        return found
