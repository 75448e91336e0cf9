"""Workers for the tests of runtimes: what they do is in their methods' names."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.data_proto import DataProto
from tandem.ports import Collect, Consumer, Dispatch, TransferQueue, register
from tandem.runtime.placement import Rank
from tandem.types import BatchRef, Metrics


class Worker:
    def __init__(self, rank: Rank, queue: TransferQueue | None = None) -> None:
        self.rank = rank
        self._queue = queue
        self._begun: asyncio.Future[float] = asyncio.Future()

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.BROADCAST, Collect.SUM)
    async def nothing(self) -> Metrics:
        return Metrics()

    @register(Dispatch.SPLIT, Collect.SUM)
    async def update(self, batch: BatchRef) -> Metrics:
        return Metrics.sum({"rows": len(batch.keys), "tokens": sum(batch.lengths)})

    @register(Dispatch.SPLIT, Collect.CONCAT)
    async def same(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def echo(self, value: object) -> object:
        return value

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def sleep(self, seconds: float, rank: int = -1) -> None:
        """Computes, as far as anybody can see; on one rank, or on all."""
        if rank in (-1, self.rank.index):
            time.sleep(seconds)  # noqa: ASYNC251 a computation does not give way

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def wait(self) -> None:
        await self.for_ever()

    async def for_ever(self) -> None:
        await asyncio.Event().wait()

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def keep_the_interpreter(self) -> None:
        ctypes.PyDLL(None).sleep(60)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def die(self, rank: int, number: int) -> None:
        """One rank kills itself with a last word; the others wait."""
        if self.rank.index == rank:
            print("my last word", file=sys.stderr)
            os.kill(os.getpid(), number)
        time.sleep(60)  # noqa: ASYNC251

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def child(self) -> int:
        """Starts a process that nobody ends."""
        return subprocess.Popen(["sleep", "1000"]).pid  # noqa: ASYNC220

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def add(self) -> float:
        """The sum of the ranks' indices, in a collective."""
        tensor = torch.tensor([float(self.rank.index)])
        dist.all_reduce(tensor)
        return tensor.item()

    @register(Dispatch.BROADCAST, Collect.FIRST, beside=True)
    async def until_begun(self) -> float:
        """What `begin` gives it."""
        return await self._begun

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def begin(self) -> None:
        self._begun.set_result(await self.add())

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def add_in_a_new_group(self) -> float:
        tensor = torch.tensor([float(self.rank.index)])
        dist.all_reduce(tensor, group=dist.new_group(range(self.rank.size)))
        return tensor.item()

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def add_later(self, value: float, late_rank: int) -> float:
        """A sum over the ranks, one of which comes to it late, having waited for something else."""
        await asyncio.sleep(0.2 * (self.rank.index == late_rank))
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return tensor.item()

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def add_first(self, values: torch.Tensor) -> float:
        """The first of the values, added up over the ranks."""
        tensor = values[:1].clone()
        dist.all_reduce(tensor)
        return tensor.item()

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def sleep_and_add(self, rank: int) -> float:
        """One rank sleeps while the others wait for it in a collective."""
        if self.rank.index == rank:
            time.sleep(60)  # noqa: ASYNC251
        return await self.add()

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def sleep_by_rank(self, seconds: float) -> None:
        time.sleep(self.rank.index * seconds)  # noqa: ASYNC251

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def local_error(self) -> None:
        class LocalError(Exception):
            pass

        raise LocalError("no class of yours")

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def lambda_back(self) -> object:
        return lambda: None

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def fail_late(self) -> None:
        await asyncio.sleep(0.01 * self.rank.index)
        raise SystemError("out of turn")

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def exit(self, code: int) -> None:
        sys.exit(code)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def sees(self) -> tuple[int, str]:
        """Threads of one operation, and the visible accelerators."""
        return torch.get_num_threads(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def fail_before_adding(self, rank: int) -> float:
        if self.rank.index == rank:
            raise ValueError(f"rank {rank} cannot")
        return await self.add()

    @register(Dispatch.SPLIT, Collect.SUM)
    async def score(self, batch: BatchRef) -> Metrics:
        """Reads column `x` of its rows from the queue and writes twice that as `y`."""
        assert self._queue is not None
        rows = await self._queue.get(batch.keys, frozenset({"x"}))
        await self._queue.write(DataProto.make(rows.keys, rows.lengths, token={"y": rows["x"] * 2}))
        return Metrics.sum({"rows": len(rows)})

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def through(self, queue: TransferQueue, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """A call of a queue, made here."""
        result = getattr(queue, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def take(self, column: str) -> None:
        assert self._queue is not None
        await self._queue.take(Consumer("worker"), frozenset({column}), 1)


def unborn(rank: Rank) -> Worker:
    """The factory of a worker whose process does not live to see it."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(rank)


def short_lived(rank: Rank, lives: Path) -> Worker:
    """The factory of a worker of which the first lives, and no other. lives: a file with a line for each."""
    with lives.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return Worker(rank) if len(lives.read_text().split()) == 1 else unborn(rank)


def late(rank: Rank, lives: Path) -> Worker:
    """The factory of a worker of which the first comes at once, and others after minutes. lives: as of `short_lived`."""
    with lives.open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600 * (len(lives.read_text().split()) > 1))
    return Worker(rank)
