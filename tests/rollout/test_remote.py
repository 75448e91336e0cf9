"""An engine in a worker: the samples of one here, weights that travel by handle, and how it fails; the port's laws are in
contracts/.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import device
from tandem.checkpoint.collective import Collective
from tandem.checkpoint.disk import Disk
from tandem.checkpoint.publisher import CheckpointConfig, Publisher
from tandem.checkpoint.shared_memory import SharedMemory
from tandem.device import Hardware
from tandem.errors import EngineError, WorkerError
from tandem.queue.memory import MemoryQueue
from tandem.rollout.native import NativeEngine
from tandem.rollout.remote import EngineWorker, RemoteEngine
from tandem.runtime.inline import InlineGroup
from tandem.runtime.placement import ResourcePool, place
from tandem.runtime.process import Processes
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.workers import ModelWorker
from tandem.types import Chunk, PolicyRef
from tests.rollout.tiny import answer, answers, decoder, engine, request

CONFIG: dict[str, Any] = {"slots": 8, "max_context": 128, "chunk_tokens": 4}
NATIVE = frozenset({"batch_invariant", "exact"})
PROMPTS = [(1, 2, 3, 4), (9, 8), (5,), (7, 7, 7, 7, 7)]


@asynccontextmanager
async def served(logs: Path, seed: int = 0) -> AsyncGenerator[RemoteEngine]:
    """A native engine in a process."""
    runtime = Processes(place([ResourcePool("rollout", 1)], Hardware(1)), logs, limit_s=30)
    group = runtime.group("rollout", "rollout", "tests.rollout.served:native", seed, CONFIG, logs / "pid")
    async with runtime:
        made = RemoteEngine(group, vocab_size=61, max_context=128, capabilities=NATIVE)
        yield made
        await made.close()


async def last(stream: AsyncIterator[Chunk]) -> Chunk:
    return [chunk async for chunk in stream][-1]


def asked(num: int = 12, **params: Any) -> list[Any]:
    """More than there are slots, of different lengths."""
    return [
        request(i, PROMPTS[i % 4], member=j, **{"max_tokens": 20 + 3 * i, "temperature": 0.7 + 0.1 * j, **params})
        for i in range(num // 2)
        for j in range(2)
    ]


def test_samples_are_those_of_an_engine_here_bit_for_bit(tmp_path: Path) -> None:
    local = asyncio.run(answers(engine(decoder(), **CONFIG), asked()))

    async def scene() -> None:
        async with served(tmp_path) as remote:
            assert await answers(remote, asked()) == local

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("encoding", ["full", "delta"])
@pytest.mark.parametrize("name", ["shared_memory", "collective", "disk"])
def test_weights_travel_to_the_worker_by_handle(name: str, encoding: str, tmp_path: Path) -> None:
    """The engine there agrees with the trainer on every bit, publish after publish, and its samples are those of the trainer's."""
    transports = {
        "shared_memory": SharedMemory,
        "collective": lambda: Collective("127.0.0.1", device.select("cpu"), 1 << 14, limit_s=20),
        "disk": lambda: Disk(tmp_path / "weights", 1 << 14),
    }
    trained = decoder(seed=1)
    trainer = InlineGroup([ModelWorker(TorchEngine(trained, TrainConfig()), MemoryQueue())])
    config = CheckpointConfig(encoding=encoding, limit_s=20)  # type: ignore[arg-type]

    async def scene() -> None:
        publisher = Publisher([transports[name]()], config, [[1, 2, 3], [4, 5]])
        async with served(tmp_path / "logs") as remote, aclosing(publisher):
            await publisher.connect(trainer, [remote])
            for version in range(1, 4):
                metrics = await publisher.publish(PolicyRef(version=version))
                assert metrics["publish/left_out"].value == 0
                assert metrics["publish/probe_gap"].value == 0
                assert remote.policy == PolicyRef(version=version)
                here = NativeEngine(trained, str, engine(trained, **CONFIG).config, exact=True, policy=remote.policy)
                assert await answers(remote, asked(4)) == await answers(here, asked(4))
                with torch.no_grad():
                    for parameter in trained.parameters():
                        parameter[::2] += 0.01

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_worker_that_is_killed_ends_its_requests_and_every_call(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served(tmp_path) as remote:
            streams = [remote.generate(one) for one in asked(4, max_tokens=100)]
            await asyncio.gather(*map(anext, streams))
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            for stream in streams:
                with pytest.raises(WorkerError, match="killed by SIGKILL"):
                    await last(stream)
            with pytest.raises(WorkerError, match="killed by SIGKILL"):
                await remote.pause()
            with pytest.raises(WorkerError, match="killed by SIGKILL"):
                await answer(remote, request(9, (1,), max_tokens=9))

    asyncio.run(asyncio.wait_for(scene(), 30))


class Renewed(InlineGroup):
    """Its worker can be replaced; what engines say takes a while."""

    def __init__(self) -> None:
        super().__init__([EngineWorker(engine(decoder(), **CONFIG))])

    @property
    def worker(self) -> EngineWorker:
        (worker,) = self._workers
        assert isinstance(worker, EngineWorker)
        return worker

    def renew(self) -> None:
        self.__init__()

    async def _all(self, method: str, calls: Any) -> list[Any]:
        found = await super()._all(method, calls)
        await asyncio.sleep(0.01 * (method == "said"))
        return found


def test_what_was_asked_of_a_worker_that_is_gone_is_not_asked_of_the_new_one() -> None:
    group = Renewed()
    remote = RemoteEngine(group, vocab_size=61, max_context=128, capabilities=NATIVE, policy=PolicyRef(version=3))

    async def scene() -> None:
        asking = asyncio.create_task(answer(remote, request(0, (1, 2), max_tokens=9)))
        await asyncio.sleep(0)  # it is asked, and not sent yet
        group.renew()
        remote.begin_again()
        with pytest.raises(WorkerError, match="is gone, and there is another one"):
            await asking
        assert group.worker._num_said == 0
        assert remote.policy == PolicyRef()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_what_a_new_worker_has_said_has_arrived_when_a_pause_of_it_returns() -> None:
    """However much was said by the one before."""
    group = Renewed()
    remote = RemoteEngine(group, vocab_size=61, max_context=128, capabilities=NATIVE)

    async def scene() -> None:
        await answers(remote, asked())
        group.renew()
        remote.begin_again()
        async with aclosing(remote.generate(request(0, (1, 2), max_tokens=100))) as stream:
            await anext(stream)
            await remote.pause()
            assert remote._num_heard == group.worker._num_said > 0

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_pause_comes_to_its_end_whatever_is_under_way() -> None:
    """Also the first one after a lull, when nothing was heard of the new request yet."""
    remote = RemoteEngine(
        InlineGroup([EngineWorker(engine(decoder(), **CONFIG))]), vocab_size=61, max_context=128, capabilities=NATIVE
    )

    async def scene() -> None:
        await answer(remote, request(0, (1, 2), max_tokens=9))
        for number in range(1, 20):
            async with aclosing(remote.generate(request(number, (1, 2), max_tokens=100))) as stream:
                first = asyncio.ensure_future(anext(stream))
                for _ in range(number):
                    await asyncio.sleep(0)
                await remote.pause()
                await remote.resume()
                await first

    faulthandler.dump_traceback_later(30, exit=True)  # a loop that never gives way hears of no other limit
    try:
        asyncio.run(asyncio.wait_for(scene(), 20))
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_a_failed_step_is_the_error_that_it_would_be_here() -> None:
    model = decoder()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    remote = RemoteEngine(InlineGroup([EngineWorker(engine(model))]), vocab_size=61, max_context=128, capabilities=NATIVE)

    async def scene() -> None:
        with pytest.raises(EngineError, match="generation failed with NonFiniteError"):
            await answer(remote, request(0, (1, 2), max_tokens=9))

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_message_holds_the_chunks_of_many_requests() -> None:
    """While one is on its way others gather."""
    calls: list[str] = []

    class Counted(InlineGroup):
        async def _all(self, method: str, calls_: Any) -> list[Any]:
            calls.append(method)
            return await super()._all(method, calls_)

    remote = RemoteEngine(Counted([EngineWorker(engine(decoder(), **CONFIG))]), vocab_size=61, max_context=128, capabilities=NATIVE)

    async def scene() -> None:
        got = await answers(remote, [request(i, (1, 2), max_tokens=40) for i in range(8)])
        assert sum(one.num_chunks for one in got) == 80
        assert calls.count("submit") == 1
        assert calls.count("said") <= 12

    asyncio.run(asyncio.wait_for(scene(), 30))
