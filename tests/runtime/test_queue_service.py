"""A queue served to worker processes: they fetch and write their rows, and nothing is given to one that is gone."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch

from tandem.data_proto import DataProto
from tandem.device import Hardware
from tandem.errors import RunError, WorkerError
from tandem.ports import Consumer
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.runtime.link import Link, outbox
from tandem.runtime.placement import ResourcePool, place
from tandem.runtime.process import Processes
from tandem.runtime.queue_service import QueueServer, shared
from tandem.types import GroupKey, Key
from tests.runtime.workers import Worker

X = frozenset({"x"})
LEARNER = Consumer("learner")


async def fill(queue: MemoryQueue, lengths: list[int]) -> DataProto:
    rows = DataProto.make([Key("train", i) for i in range(len(lengths))], lengths, token={"x": torch.rand(sum(lengths))})
    for key in rows.keys:
        await queue.reserve(key.group, 1)
    await queue.put(rows)
    return rows


@pytest.mark.parametrize("lengths", [[3000, 5000, 2000, 6000], [8]])
def test_workers_fetch_their_rows_by_handle_and_write_columns(tmp_path: Path, lengths: list[int]) -> None:
    async def main() -> None:
        queue = MemoryQueue()
        server, runtime = QueueServer(queue), Processes(place([ResourcePool("pool", 3)], Hardware(cores=3)), tmp_path)
        group = runtime.group("policy", "pool", "tests.runtime.workers:Worker", server.client())
        async with server, runtime:
            rows = await fill(queue, lengths)
            lease = await queue.take(LEARNER, X, len(lengths))
            assert (await group.call(Worker.score, lease.ref))["rows"].value == len(lengths)
        written = await queue.get(lease.ref.keys, frozenset({"y"}))  # also when the workers are gone
        assert torch.equal(written["y"], rows["x"] * 2)

    asyncio.run(main())


def test_rows_that_a_queue_joined_in_shared_memory_are_shown_and_not_copied(tmp_path: Path) -> None:
    async def main() -> None:
        queue = MemoryQueue(join=shared)
        server, runtime = QueueServer(queue), Processes(place([ResourcePool("pool", 2)], Hardware(cores=2)), tmp_path)
        group = runtime.group("policy", "pool", "tests.runtime.workers:Worker", server.client())
        async with server, runtime:
            for ordinal in range(4):
                await queue.reserve(GroupKey("train", ordinal), 1)
                await queue.put(
                    DataProto.make([Key("train", ordinal)], [20_000], token={"x": torch.full((20_000,), float(ordinal))})
                )
            lease = await queue.take(LEARNER, X, 4)
            for part in (lease.ref, lease.ref.select([1, 2])):
                rows = await queue.get(part.keys, X)
                parcel = outbox().pack(rows)
                assert parcel.num_bytes < rows["x"].nbytes / 10
                assert len(parcel.others) == 1
                parcel.close()
            await group.call(Worker.score, lease.ref)
        written = await queue.get(lease.ref.keys, frozenset({"x", "y"}))
        assert torch.equal(written["y"], torch.arange(4.0).repeat_interleave(20_000) * 2)
        assert torch.equal(written["x"] * 2, written["y"])

    asyncio.run(main())


def test_a_client_that_is_gone_takes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        queue = MemoryQueue(QueueConfig(stall_limit_s=5))
        server, runtime = QueueServer(queue), Processes(place([ResourcePool("pool", 1)], Hardware(cores=1)), tmp_path)
        group = runtime.group("policy", "pool", "tests.runtime.workers:Worker", server.client())
        async with server, runtime:
            taking = asyncio.ensure_future(group.call(Worker.take, "x"))
            await asyncio.sleep(0.3)
            os.kill(await group.call(Worker.pid), signal.SIGKILL)
            with pytest.raises(WorkerError, match="SIGKILL"):
                await taking
            await fill(queue, [1])
            await asyncio.sleep(0.1)  # whoever still waits is served first
            assert (await queue.take(LEARNER, X, 1)).ref.keys == (Key("train", 0),)

    asyncio.run(main())


def test_an_owner_that_is_gone_is_an_error_and_only_the_ports_methods_are_served() -> None:
    async def main() -> None:
        queue = MemoryQueue()
        async with QueueServer(queue) as server:
            client = pickle.loads(pickle.dumps(server.client()))
            await client.reserve(GroupKey("train", 0), 1)
            link: Link = client._link()
            with pytest.raises(RunError, match="no method '_ledger'"):
                await link.call(("_ledger", (), {}))
            with pytest.raises(TypeError):
                await link.call(("put", (), {}))
        for late in (client, server.client()):
            with pytest.raises(WorkerError, match="not served any more"):
                await late.commit("s")
            with pytest.raises(WorkerError, match="not served any more"):
                late.metrics()

    asyncio.run(main())
