"""The price of a WorkerGroup: what a call costs without work, what handing over columns costs, how soon a worker is there.

    pip install verl==0.9.1       # in an environment of its own, beside Tandem and Ray
    python benchmarks/runtime.py  # prints JSON; exits with 1 where a number is above its limit

Handing over: 64 MB of columns lie in the queue of this process, where rows were put group by group and leased together. Two
workers fetch their rows by handle and write columns of the same size back, which the queue then has. Peers, in rounds of the
same run that take turns: one copy of those columns to pages that are there; put and get of them in Ray's object store, in this
process; and verl 0.9.1, whose two Ray workers get the same bytes as a DataProto and return them (DP_COMPUTE_PROTO), without a
row of padding. The best of all rounds counts, since noise only adds time. Three processes copy at the same time, so two cores
have to be free for a moment; `take` is the queue's own joining of rows before, which any runtime pays.
"""

from __future__ import annotations

import asyncio
import json
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
from tandem.runtime.queue_service import QueueServer, shared
from tandem.types import BatchRef, GroupKey, Key, Metrics

ROWS, GROUP, COLUMNS, TOTAL_BYTES = 256, 8, 4, 64 << 20
ROUNDS, CALLS = 100, 10
LIMITS = {
    "inline_8_ranks_update_ms": 1.0,
    "process_2_ranks_update_ms": 2.0,
    "ray_2_ranks_update_ms": 4.0,
    "next_worker_ready_s": 1.0,
    "process_over_memcpy": 2.0,
    "ray_over_put_get": 3.0,
    "process_over_verl": 0.5,
    "ray_over_verl": 0.5,
}
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
async def actors(queue: MemoryQueue) -> AsyncGenerator[WorkerGroup]:
    with tempfile.TemporaryDirectory() as logs:
        runtime = import_module("tandem.runtime.ray").RayCluster([POOL], Path(logs))
        server = import_module("tandem.runtime.ray_queue").RayQueueServer(queue, runtime)
        group = runtime.group("worker", "pool", FACTORY, server.client())
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


async def handing(report: dict[str, float]) -> None:
    ray = import_module("ray")  # not above, where each worker process would import it too
    ordinals = count()
    rows = batch(ordinals)
    targets = {name: torch.ones_like(column) for name, column in rows.batch.items()}
    value = [column.numpy() for column in rows.batch.values()]
    theirs = verl_group()
    tables = import_module("verl").DataProto.from_dict({name: column.view(ROWS, -1) for name, column in rows.batch.items()})

    async def memcpy() -> None:
        for name, column in rows.batch.items():
            targets[name].copy_(column)

    async def put_get() -> None:
        ray.get(ray.put(value))

    async def verl() -> None:
        assert len(theirs.same(tables)) == ROWS

    local, remote = MemoryQueue(join=shared), MemoryQueue(join=import_module("tandem.runtime.objects").shared)
    ref = rows.ref()
    best: Times = {}
    async with processes(local) as group, actors(remote) as far_group:
        for _ in range(ROUNDS):
            await timed(best, "process_update", lambda: group.call(Worker.update, ref), CALLS)
            await timed(best, "ray_update", lambda: far_group.call(Worker.update, ref), CALLS)
            await timed(best, "memcpy", memcpy)
            await hand_over(best, "process", local, group, rows, ordinals)
            await timed(best, "put_get", put_get)
            await hand_over(best, "ray", remote, far_group, rows, ordinals)
            await timed(best, "verl", verl)
    report |= {f"{name}_2_ranks_update_ms": 1000 * best.pop(f"{name}_update") for name in ("process", "ray")}
    report |= {f"{name}_ms": 1000 * seconds for name, seconds in best.items()}
    report["process_over_memcpy"] = best["process"] / best["memcpy"]
    report["ray_over_put_get"] = best["ray"] / best["put_get"]
    report |= {f"{name}_over_verl": best[name] / best["verl"] for name in ("process", "ray")}


async def measured() -> dict[str, float]:
    report: dict[str, float] = {}
    ref = batch(count()).ref()
    inline = InlineGroup([Worker(Rank(index, 8)) for index in range(8)])
    best: Times = {}
    for _ in range(ROUNDS):
        await timed(best, "inline", lambda: inline.call(Worker.update, ref), CALLS)
    report["inline_8_ranks_update_ms"] = 1000 * best["inline"]
    report["first_worker_ready_s"] = await ready()
    report["next_worker_ready_s"] = await ready()
    await handing(report)
    return report


def main() -> int:
    torch.set_num_threads(1)
    try:
        import_module("verl")
    except ModuleNotFoundError as error:
        print(f"the peer is missing ({error}): pip install verl==0.9.1 in an environment of its own", file=sys.stderr)
        return 2
    ray = import_module("ray")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    ray.init("local", num_cpus=64, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    report = asyncio.run(measured())
    ray.shutdown()
    above = {name: limit for name, limit in LIMITS.items() if report[name] > limit}
    print(
        json.dumps({name: round(value, 3) for name, value in report.items()} | {"limits": LIMITS, "above": sorted(above)}, indent=1)
    )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
