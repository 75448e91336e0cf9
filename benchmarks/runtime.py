"""The price of a WorkerGroup: what a call costs without work, what handing over columns costs, how soon a worker is there.

    pip install verl==0.9.1       # in an environment of its own, beside Tandem and Ray
    python benchmarks/runtime.py  # the last line is JSON; exits with 1 where a ratio is below its floor

Handing over: 64 MB of columns lie in the queue of this process, where rows were put group by group and leased together. Two
workers fetch their rows by handle and write columns of the same size back, which the queue then has. Peers, in rounds that take
turns: for processes, one copy of those columns to pages that are there; for actors, with Ray's own processes beside, put and get
of them in Ray's object store, in this process, and verl 0.9.1, whose two Ray workers get the same bytes as a DataProto and return
them (DP_COMPUTE_PROTO), without a row of padding. Actors on the controller's machine share memory with it; far_ms is what it takes
actors that reach it through Ray's store alone, as from another machine. The best of all rounds counts, since noise only adds time.
Three processes copy at the same time, so two cores have to be free for a moment; joining rows, which the queue does before
(take_ms) and any runtime pays, is left out. A ratio is the other's time by Tandem's; of an empty call and of a worker's start, a
given time by Tandem's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tandem.data_proto import DataProto
from tandem.device import Hardware
from tandem.ports import Collect, Consumer, Dispatch, TransferQueue, WorkerGroup, register
from tandem.queue.memory import MemoryQueue
from tandem.runtime.inline import InlineGroup
from tandem.runtime.placement import Rank, ResourcePool, place
from tandem.runtime.process import Processes
from tandem.runtime.queue_service import QueueClient, QueueServer, shared
from tandem.types import BatchRef, GroupKey, Key, Metrics

ROWS, GROUP, COLUMNS, TOTAL_BYTES = 256, 8, 4, 64 << 20
ROUNDS, CALLS = 40, 10
CLAIMS = (
    ("empty update, 8 inline ranks", "inline_update", "1 ms", 0.001, 1.0, 4.0),
    ("empty update, 2 processes", "process_update", "2 ms", 0.002, 1.0, 2.0),
    ("empty update, 2 Ray actors", "ray_update", "4 ms", 0.004, 1.0, 2.0),
    ("the next worker is ready", "next_ready", "1 s", 1.0, 1.0, 4.0),
    ("64 MB to 2 processes and back", "process", "one copy", "memcpy", 1 / 2, 2 / 3),
    ("64 MB to 2 processes and back", "process", "verl 0.9.1", "verl", 2.0, 10.0),
    ("64 MB to 2 Ray actors and back", "ray", "put and get of Ray", "put_get", 1 / 3, 1 / 2),
    ("64 MB to 2 Ray actors and back", "ray", "verl 0.9.1", "verl", 2.0, 10.0),
)
"""What is claimed: case, its time's name, against what, in seconds or by its time's name, floor, stretch."""
NAMES = frozenset(f"x{i}" for i in range(COLUMNS))
FACTORY = f"{Path(__file__)}:Worker"
POOL = ResourcePool("pool", 2)


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


def batch(ordinals: count[int]) -> DataProto:
    """ROWS rows of random lengths, and columns of TOTAL_BYTES together."""
    seeded = torch.Generator().manual_seed(0)
    tokens = TOTAL_BYTES // (4 * COLUMNS)
    cuts = torch.rand(ROWS, generator=seeded).add(0.5).cumsum(0)
    ends = (cuts / cuts[-1] * tokens).long()
    lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
    return DataProto.make(keys(ordinals), lengths, token={name: torch.rand(tokens, generator=seeded) for name in sorted(NAMES)})


def keys(ordinals: count[int]) -> list[Key]:
    groups = [next(ordinals) for _ in range(ROWS // GROUP)]
    return [Key("train", group, member) for group in groups for member in range(GROUP)]


Times = dict[str, float]  # the best so far, in seconds


async def timed(best: Times, name: str, call: Callable[[], Awaitable[object]], calls: int = 1) -> None:
    began = time.perf_counter()
    for _ in range(calls):
        await call()
    best[name] = min(best.get(name, float("inf")), (time.perf_counter() - began) / calls)


async def ready() -> float:
    """Seconds until the worker of a new runtime is there."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as logs:
        runtime = Processes(place([ResourcePool("pool", 1)], Hardware(cores=1)), Path(logs))
        runtime.group("worker", "pool", FACTORY)
        async with runtime:
            return time.perf_counter() - began


@asynccontextmanager
async def processes(queue: MemoryQueue) -> AsyncGenerator[WorkerGroup]:
    with tempfile.TemporaryDirectory() as logs:
        server, runtime = QueueServer(queue), Processes(place([POOL], Hardware(cores=POOL.ranks)), Path(logs))
        group = runtime.group("worker", "pool", FACTORY, server.client())
        async with server, runtime:
            yield group


@asynccontextmanager
async def actors(queue: MemoryQueue, *, far: bool) -> AsyncGenerator[WorkerGroup]:
    with tempfile.TemporaryDirectory() as logs:
        runtime, on_ray = (
            import_module("tandem.runtime.ray").RayCluster([POOL], Path(logs)),
            import_module("tandem.runtime.ray_queue"),
        )
        server = on_ray.RayQueueServer(queue, runtime)
        client = on_ray.RayQueueClient(server.client().name, QueueClient("elsewhere")) if far else server.client()
        group = runtime.group("worker", "pool", FACTORY, client)
        async with server, runtime:
            yield group


async def hand_over(best: Times, name: str, queue: MemoryQueue, group: WorkerGroup, rows: DataProto, ordinals: count[int]) -> None:
    """One round: new rows into the queue, to the workers and back."""
    fresh = DataProto.make(keys(ordinals), rows.lengths, token=rows.batch)
    for part in fresh.chunk(ROWS // GROUP):
        await queue.reserve(GroupKey(*part.keys[0].group), GROUP)
        await queue.put(part)
    began = time.perf_counter()
    lease = await queue.take(Consumer("benchmark"), NAMES, ROWS // GROUP)
    best["take"] = min(best.get("take", float("inf")), time.perf_counter() - began)
    await timed(best, name, lambda: group.call(Worker.exchange, lease.ref))
    await queue.ack(lease)


def verl_group() -> Any:
    """Two of verl's workers on Ray."""
    base, on_ray = import_module("verl.single_controller.base"), import_module("verl.single_controller.ray")
    decorator = import_module("verl.single_controller.base.decorator")

    class Same(base.Worker):
        @decorator.register(dispatch_mode=decorator.Dispatch.DP_COMPUTE_PROTO)
        def same(self, data: Any) -> Any:
            return data

    pool = on_ray.RayResourcePool(process_on_nodes=[POOL.ranks], use_gpu=False)
    return on_ray.RayWorkerGroup(pool, on_ray.RayClassWithInitArgs(import_module("ray").remote(Same)))


async def to_processes(best: Times) -> None:
    ordinals = count()
    rows, queue = batch(ordinals), MemoryQueue(join=shared)
    targets = {name: torch.ones_like(column) for name, column in rows.batch.items()}

    async def memcpy() -> None:
        for name, column in rows.batch.items():
            targets[name].copy_(column)

    async with processes(queue) as group:
        for _ in range(ROUNDS):
            await timed(best, "process_update", lambda: group.call(Worker.update, rows.ref()), CALLS)
            await timed(best, "memcpy", memcpy)
            await hand_over(best, "process", queue, group, rows, ordinals)


async def to_actors(best: Times) -> None:
    ray = import_module("ray")  # not above, where each worker process would import it too
    ordinals = count()
    rows = batch(ordinals)
    value = [column.numpy() for column in rows.batch.values()]
    theirs = verl_group()
    tables = import_module("verl").DataProto.from_dict({name: column.view(ROWS, -1) for name, column in rows.batch.items()})

    async def put_get() -> None:
        ray.get(ray.put(value))

    async def verl() -> None:
        assert len(theirs.same(tables)) == ROWS

    for name, far in (("ray", False), ("far", True)):
        queue = MemoryQueue(join=shared)
        async with actors(queue, far=far) as group:
            for _ in range(ROUNDS):
                await timed(best, "ray_update", lambda: group.call(Worker.update, rows.ref()), CALLS)
                await timed(best, "put_get", put_get)
                await hand_over(best, name, queue, group, rows, ordinals)
                await timed(best, "verl", verl)


async def measured() -> Times:
    best: Times = {}
    ref = batch(count()).ref()
    inline = InlineGroup([Worker(Rank(index, 8)) for index in range(8)])
    for _ in range(ROUNDS):
        await timed(best, "inline_update", lambda: inline.call(Worker.update, ref), CALLS)
    best["first_ready"] = await ready()
    best["next_ready"] = await ready()
    await to_processes(best)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    ray = import_module("ray")
    ray.init("local", num_cpus=64, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    await to_actors(best)
    ray.shutdown()
    return best


def claimed(best: Times) -> list[dict[str, Any]]:
    """One row of the last line for each of CLAIMS."""
    row = import_module("lines").row  # not above: each worker process imports this file, and finds no others beside it
    rows: list[dict[str, Any]] = []
    for case, name, against, other, floor, stretch in CLAIMS:
        peer_s = best[other] if isinstance(other, str) else other
        more = {"peer_ms": round(1000 * peer_s, 3), "tandem_ms": round(1000 * best[name], 3)}
        more |= {"far_ms": round(1000 * best["far"], 3)} if name == "ray" else {}
        rows.append(row(case, against, [peer_s / best[name]], round(floor, 3), round(stretch, 3), **more))
    return rows


def main() -> int:
    torch.set_num_threads(1)
    try:
        import_module("verl")
    except ModuleNotFoundError as error:
        print(f"the peer is missing ({error}): pip install verl==0.9.1 in an environment of its own", file=sys.stderr)
        return 2
    best = asyncio.run(measured())
    print({f"{name}_ms": round(1000 * seconds, 3) for name, seconds in best.items()}, file=sys.stderr)
    return import_module("lines").publish("runtime", claimed(best))


if __name__ == "__main__":
    sys.exit(main())
