"""The price of a WorkerGroup: what a call costs without work, what handing over columns costs, how soon a worker is there.

    python benchmarks/runtime.py  # prints JSON; exits with 1 where a number is above its limit

Handing over: 64 MB of columns lie in the queue of this process. Two worker processes fetch their rows by handle and write
columns of the same size back, which the queue then has; the floor is one copy of those columns to pages that are there, in
alternating rounds of the same run. By value: the same columns as the argument of a call, and its result. The best of several
rounds counts, since noise only adds time; three processes need two cores that are free for a moment.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch

from tandem.data_proto import DataProto
from tandem.device import Hardware
from tandem.ports import Collect, Consumer, Dispatch, TransferQueue, WorkerGroup, register
from tandem.queue.memory import MemoryQueue
from tandem.runtime.inline import InlineGroup
from tandem.runtime.placement import Rank, ResourcePool, place
from tandem.runtime.process import Processes
from tandem.runtime.queue_service import QueueServer, shared
from tandem.types import BatchRef, GroupKey, Key, Metrics

ROWS, GROUP, COLUMNS, TOTAL_BYTES = 256, 8, 4, 64 << 20
ROUNDS, CALLS = 200, 10
LIMITS = {
    "inline_8_ranks_update_ms": 1.0,
    "process_2_ranks_update_ms": 2.0,
    "next_worker_ready_s": 1.0,
    "by_handle_over_memcpy": 2.0,
}
NAMES = frozenset(f"x{i}" for i in range(COLUMNS))


class Worker:
    """Does nothing, or nothing but moving columns."""

    def __init__(self, rank: Rank, queue: TransferQueue | None = None) -> None:
        self._queue = queue

    @register(Dispatch.SPLIT, Collect.SUM)
    async def update(self, batch: BatchRef) -> Metrics:
        return Metrics.sum({"rows": len(batch.keys)})

    @register(Dispatch.SPLIT, Collect.SUM)
    async def exchange(self, batch: BatchRef) -> Metrics:
        assert self._queue is not None
        rows = await self._queue.get(batch.keys, NAMES)
        await self._queue.write(DataProto.make(rows.keys, rows.lengths, token={f"y{name}": rows[name] for name in NAMES}))
        return Metrics()

    @register(Dispatch.SPLIT, Collect.CONCAT)
    async def same(self, batch: DataProto) -> DataProto:
        return batch


def batch(ordinals: count[int]) -> DataProto:
    """ROWS rows of random lengths, and columns of TOTAL_BYTES together."""
    seeded = torch.Generator().manual_seed(0)
    tokens = TOTAL_BYTES // (4 * COLUMNS)
    cuts = torch.rand(ROWS, generator=seeded).add(0.5).cumsum(0)
    ends = (cuts / cuts[-1] * tokens).long()
    lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
    groups = [next(ordinals) for _ in range(ROWS // GROUP)]
    keys = [Key("train", group, member) for group in groups for member in range(GROUP)]
    return DataProto.make(keys, lengths, token={name: torch.rand(tokens, generator=seeded) for name in sorted(NAMES)})


async def fastest(call: Callable[[], Awaitable[object]], calls: int = 1) -> float:
    """Seconds of one call, in the best of ROUNDS rounds of `calls`."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            await call()
        best = min(best, (time.perf_counter() - began) / calls)
    return best


async def ready(ranks: int, *arguments: object) -> float:
    """Seconds until the workers of a new runtime are there."""
    began = time.perf_counter()
    async with pool(ranks, *arguments):
        return time.perf_counter() - began


@asynccontextmanager
async def pool(ranks: int, *arguments: object) -> AsyncGenerator[WorkerGroup]:
    with tempfile.TemporaryDirectory() as logs:
        runtime = Processes(place([ResourcePool("pool", ranks)], Hardware(cores=ranks)), Path(logs))
        group = runtime.group("worker", "pool", f"{Path(__file__)}:Worker", *arguments)
        async with runtime:
            yield group


async def handing(queue: MemoryQueue, group: WorkerGroup, report: dict[str, float]) -> None:
    ordinals = count()
    rows = batch(ordinals)
    targets = {name: torch.ones_like(column) for name, column in rows.batch.items()}
    best = dict.fromkeys(("memcpy", "by_handle", "by_value"), float("inf"))

    async def timed(name: str, call: Callable[[], Awaitable[object]]) -> None:
        began = time.perf_counter()
        await call()
        best[name] = min(best[name], time.perf_counter() - began)

    async def memcpy() -> None:
        for name, column in rows.batch.items():
            targets[name].copy_(column)

    for _ in range(ROUNDS):
        await timed("memcpy", memcpy)
        groups = [next(ordinals) for _ in range(ROWS // GROUP)]
        keys = tuple(Key("train", group, member) for group in groups for member in range(GROUP))
        for key in dict.fromkeys(key.group for key in keys):
            await queue.reserve(GroupKey(*key), GROUP)
        for part in DataProto.make(keys, rows.lengths, token=rows.batch).chunk(len(groups)):
            await queue.put(part)
        lease = await queue.take(Consumer("benchmark"), NAMES, len(groups))
        await timed("by_handle", partial(group.call, Worker.exchange, lease.ref))
        await queue.ack(lease)
        await timed("by_value", partial(group.call, Worker.same, rows))
    report["memcpy_ms"] = 1000 * best["memcpy"]
    report |= {f"{name}_over_memcpy": best[name] / best["memcpy"] for name in ("by_handle", "by_value")}


async def measured() -> dict[str, float]:
    report: dict[str, float] = {}
    ref = batch(count()).ref()
    inline = InlineGroup([Worker(Rank(index, 8)) for index in range(8)])
    report["inline_8_ranks_update_ms"] = 1000 * await fastest(lambda: inline.call(Worker.update, ref), CALLS)
    queue = MemoryQueue(empty=shared)
    report["first_worker_ready_s"] = await ready(1)
    report["next_worker_ready_s"] = await ready(1)
    async with QueueServer(queue) as server, pool(2, server.client()) as group:
        report["process_2_ranks_update_ms"] = 1000 * await fastest(lambda: group.call(Worker.update, ref), CALLS)
        await handing(queue, group, report)
    return report


def main() -> int:
    torch.set_num_threads(1)
    report = asyncio.run(measured())
    above = {name: limit for name, limit in LIMITS.items() if report[name] > limit}
    print(
        json.dumps({name: round(value, 3) for name, value in report.items()} | {"limits": LIMITS, "above": sorted(above)}, indent=1)
    )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
