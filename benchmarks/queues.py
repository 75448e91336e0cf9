"""The price of a row in the queue: against TransferQueue 0.1.11 in memory, and against this disk's fdatasync on it.

    pip install torch transferqueue==0.1.11 ray[default] ...       # in an environment of its own, whose python is PEER
    python benchmarks/queues.py --peer PEER --disk DIRECTORY        # the last line is JSON; exits with 1 where a ratio misses

memory: samples of eight columns of 2,000 tokens (96 KB), put and got one by one and all 1,000 at once, by both. A put includes the
reservation of its place. durable: rows of 8 KB on the file system of DIRECTORY, which must not be one in memory, with
synchronous=FULL: one by one in turns with 8 KB written and fdatasynced to a file; and by 64 producers at once, without and with the
rest of a row's life (take, acknowledge; a snapshot's save and commit at the end). cluster: the samples of memory, in storage units
of that library on a Ray of this machine (queue=ray), beside its own interface. in flight: a row's life in memory while 100,000
others wait, and while 1,000 do. The best of the rounds counts. ratio is Tandem's rate over the other one, and of those in flight
what a row costs more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lines import publish, row, within

from tandem.data_proto import DataProto
from tandem.ports import Consumer, TransferQueue
from tandem.queue.durable import DurableQueue
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.types import GroupKey, Key

if TYPE_CHECKING:
    from tandem.queue.units import StorageUnits

SAMPLES, SINGLES, TOKENS, ROUNDS = 1000, 100, 2000, 3
PRODUCERS, ROWS, ROW_TOKENS, DISK_CALLS = 64, 12_800, 512, 200
FEW, MANY, PROBES = 1_000, 100_000, 2_000
NAMES = frozenset(f"x{i}" for i in range(8))
SMALL = frozenset(f"x{i}" for i in range(4))

PEER = """
import json, os, sys, time
os.environ |= {"TQ_LOGGING_LEVEL": "ERROR", "RAY_USAGE_STATS_ENABLED": "0"}
n, singles, length, rounds = map(int, sys.argv[1:])
import ray, torch
from tensordict import TensorDict
torch.set_num_threads(1)
ray.init(num_cpus=16, include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=10**9)
import transfer_queue as tq
from omegaconf import OmegaConf
tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}, flags={"allow_objects": True}))
rows = TensorDict(
    {f"x{i}": torch.randint(0, 50000, (n, length)) if i < 4 else torch.randn(n, length) for i in range(8)}, batch_size=n
)
best = {}
def timed(name, count, call):
    began = time.perf_counter()
    call()
    best[name] = max(best.get(name, 0), count / (time.perf_counter() - began))
for r in range(rounds):
    all_keys, part = [f"{r}_{i}" for i in range(n)], f"p{r}"
    timed("batch put", n, lambda: tq.kv_batch_put(all_keys, part, rows))
    timed("batch get", n, lambda: tq.kv_batch_get(all_keys, part))
    tq.kv_clear(all_keys, part)
    one, part = all_keys[:singles], f"s{r}"
    each = [{name: rows[name][i] for name in rows.keys()} for i in range(singles)]
    timed("one by one put", singles, lambda: [tq.kv_put(key, part, row) for key, row in zip(one, each)])
    timed("one by one get", singles, lambda: [tq.kv_batch_get(key, part) for key in one])
    tq.kv_clear(one, part)
tq.close()
ray.shutdown()
print(json.dumps(best))
"""

Rates = dict[str, float]  # the best so far, of rows a second


async def timed(best: Rates, name: str, rows: int, call: Callable[[], Awaitable[object]]) -> None:
    began = time.perf_counter()
    await call()
    best[name] = max(best.get(name, 0.0), rows / (time.perf_counter() - began))


def samples(first: int, n: int) -> DataProto:
    columns: dict[str, torch.Tensor] = {}
    for name in sorted(NAMES):
        columns[name] = torch.randint(0, 50_000, (n * TOKENS,)) if name < "x4" else torch.randn(n * TOKENS)
    return DataProto.make([Key("train", first + i) for i in range(n)], [TOKENS] * n, token=columns)


def small(ordinal: int, columns: dict[str, torch.Tensor]) -> DataProto:
    """One row of 8 KB."""
    return DataProto.make([Key("train", ordinal)], [ROW_TOKENS], token=columns)


def small_columns() -> dict[str, torch.Tensor]:
    return {n: torch.arange(ROW_TOKENS, dtype=torch.int32) if n < "x2" else torch.randn(ROW_TOKENS) for n in sorted(SMALL)}


async def in_and_out(best: Rates, make: Callable[[], TransferQueue]) -> None:
    batch, singles = samples(0, SAMPLES), [samples(SAMPLES + i, 1) for i in range(SINGLES)]
    for _ in range(ROUNDS):
        queue = make()
        await queue.restore("", None)

        async def put(parts: list[DataProto], queue: TransferQueue = queue) -> None:
            for rows in parts:
                for key in rows.keys:
                    await queue.reserve(key.group, 1)
                await queue.put(rows)

        async def get(parts: list[DataProto], queue: TransferQueue = queue) -> None:
            for rows in parts:
                await queue.get(rows.keys, NAMES)

        await timed(best, "batch put", SAMPLES, lambda: put([batch]))
        await timed(best, "batch get", SAMPLES, lambda: get([batch]))
        await timed(best, "one by one put", SINGLES, lambda: put(singles))
        await timed(best, "one by one get", SINGLES, lambda: get(singles))
        await queue.restore("", None)


async def in_units(best: Rates) -> None:
    """Imports what the environment of the peer has."""
    import ray

    from tandem.queue.cluster import ClusterQueue
    from tandem.queue.units import start

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=10**9)
    units = await start()

    async def started() -> StorageUnits:
        return units

    await in_and_out(best, lambda: ClusterQueue(started))
    await units.close()
    ray.shutdown()


async def disk(best: Rates, directory: Path) -> None:
    columns = small_columns()
    config = QueueConfig(max_groups=1 << 20)
    for turn in range(ROUNDS):
        place = directory / f"round-{turn}"
        place.mkdir()
        raw = os.open(place / "raw", os.O_WRONLY | os.O_CREAT)
        queue, ordinal = DurableQueue(place / "queue", config), 0

        async def synced(raw: int = raw) -> None:
            for _ in range(DISK_CALLS // 10):
                os.write(raw, b"x" * 8192)
                os.fdatasync(raw)

        async def alone(queue: DurableQueue = queue) -> None:
            nonlocal ordinal
            for _ in range(DISK_CALLS // 10):
                await queue.reserve(GroupKey("train", ordinal), 1)
                await queue.put(small(ordinal, columns))
                ordinal += 1

        spent = {"fdatasync": 0.0, "put": 0.0}
        for _ in range(10):
            for name, call in (("fdatasync", synced), ("put", alone)):
                began = time.perf_counter()
                await call()
                spent[name] += time.perf_counter() - began
        ratio = spent["fdatasync"] / spent["put"]
        if ratio > best.get("durable one by one", 0.0):
            best |= {"durable one by one": ratio, **{f"{name}/s": DISK_CALLS / s for name, s in spent.items()}}
        os.close(raw)

        async def producer(rows: int, queue: DurableQueue = queue) -> None:
            nonlocal ordinal
            for _ in range(rows):
                mine, ordinal = ordinal, ordinal + 1
                await queue.reserve(GroupKey("train", mine), 1)
                await queue.put(small(mine, columns))

        async def together() -> None:
            await asyncio.gather(*(producer(ROWS // PRODUCERS) for _ in range(PRODUCERS)))

        async def consumed(rows: int, queue: DurableQueue = queue, place: Path = place) -> None:
            for _ in range(rows // PRODUCERS):
                lease = await queue.take(Consumer("learner"), SMALL, PRODUCERS)
                await queue.get(lease.ref.keys, SMALL)
                await queue.ack(lease)
            await queue.save(place / "snapshot")
            await queue.commit("snapshot")

        async def cycle() -> None:
            await asyncio.gather(together(), consumed(ROWS))

        await timed(best, "64 producers", ROWS, together)
        await consumed(ordinal // PRODUCERS * PRODUCERS)
        await timed(best, "64 producers, whole cycle", ROWS, cycle)
        await queue.close()
        shutil.rmtree(place)


async def in_flight(best: Rates) -> None:
    columns = small_columns()
    for waiting in (FEW, MANY):
        queue = MemoryQueue(QueueConfig(max_groups=1 << 20))
        for ordinal in range(waiting):
            await queue.reserve(GroupKey("train", ordinal), 1)
            await queue.put(small(ordinal, columns))

        async def life(first: int, queue: MemoryQueue = queue) -> None:
            for ordinal in range(first, first + PROBES):
                await queue.reserve(GroupKey("train", ordinal), 1)
                await queue.put(small(ordinal, columns))
                lease = await queue.take(Consumer("learner"), SMALL, 1)
                await queue.get(lease.ref.keys, SMALL)
                await queue.ack(lease)

        for turn in range(ROUNDS):
            await timed(best, f"{waiting} in flight", PROBES, lambda first=waiting + turn * PROBES: life(first))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--peer", default=sys.executable, help="a python with transferqueue==0.1.11; this one, which has it too, by default"
    )
    arguments.add_argument("--disk", default=Path.cwd(), type=Path, help="a directory on a disk; the current one by default")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    ours: Rates = {}
    cluster: Rates = {}
    asyncio.run(in_and_out(ours, MemoryQueue))
    asyncio.run(in_units(cluster))
    asyncio.run(in_flight(ours))
    with tempfile.TemporaryDirectory(dir=given.disk) as place:
        asyncio.run(disk(ours, Path(place)))
    sizes = [str(size) for size in (SAMPLES, SINGLES, TOKENS, ROUNDS)]
    peer: Rates = json.loads(
        subprocess.run([given.peer, "-c", PEER, *sizes], check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]
    )
    rows: list[dict[str, Any]] = []
    for how, floor in (("one by one", 20), ("batch", 5)):
        for name in (f"{how} put", f"{how} get"):
            mine, its = ours[name], peer[name]
            rows.append(
                row(f"memory, {name}: {mine:,.0f}/s", f"TransferQueue 0.1.11: {its:,.0f}/s", [mine / its], floor, 2 * floor)
            )
    # The library sends a column of equally long rows as one piece, and Tandem, whose rows have lengths of their own, as many.
    for name, floor in {"one by one put": 1, "one by one get": 1, "batch put": 0.5, "batch get": 1}.items():
        mine, its = cluster[name], peer[name]
        rows.append(row(f"cluster, {name}: {mine:,.0f}/s", f"TransferQueue 0.1.11: {its:,.0f}/s", [mine / its], floor, 2 * floor))
    many, few = ours[f"{MANY} in flight"], ours[f"{FEW} in flight"]
    rows.append(within(f"memory, {MANY:,} in flight: {many:,.0f}/s", f"{FEW:,} in flight: {few:,.0f}/s", [few / many], 1.5))
    synced = f"8 KB and fdatasync: {ours['fdatasync/s']:,.0f}/s"
    rows.append(row(f"durable, one by one: {ours['put/s']:,.0f}/s", synced, [ours["durable one by one"]], 0.3, 1))
    for name, goal in (("64 producers", 8_000), ("64 producers, whole cycle", 5_000)):
        rows.append(row(f"durable, {name}: {ours[name]:,.0f}/s", f"{goal:,} rows/s", [ours[name] / goal], 1, 2))
    return publish("queues", rows)


if __name__ == "__main__":
    sys.exit(main())
