"""The actor in which the workers of one rank live: worker.Worker behind Ray's calls."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import platform
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray

from tandem import device
from tandem.device import Kind
from tandem.runtime.mailbox import mailbox
from tandem.runtime.objects import Answer, Packed, answer, unpacked, untyped
from tandem.runtime.placement import ResourcePool, Seat
from tandem.runtime.worker import Worker

WATCH = "watch"  # a thread beside the one of the workers


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor is: its seat, its process, and how other nodes reach its own."""

    seat: Seat
    pid: int
    host: str


class WorkerActor:
    """One rank of a pool. path: where modules are looked for. cwd: what relative paths refer to, where this node has it."""

    def __init__(self, pool: ResourcePool, rank: int, kind: Kind, log: Path, path: list[str], cwd: Path) -> None:
        with suppress(FileNotFoundError):
            os.chdir(cwd)
        sys.path += [entry for entry in path if entry not in sys.path]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        for stream in (sys.stdout, sys.stderr):
            cast("Any", stream).reconfigure(line_buffering=True)
        faulthandler.enable(2)
        faulthandler.register(signal.SIGUSR1, 2)
        device.configure_threads(pool.cores)
        devices = tuple(name for names in ray.get_runtime_context().get_accelerator_ids().values() for name in names)
        self._seat = Seat(pool.name, rank, pool.cores, kind, devices, platform.node())
        self._worker: Worker | None = None
        self._arrivals = asyncio.Condition()
        self._next = 0  # the number of the order that begins next

    async def obey(self, number: int, value: Packed) -> Answer:
        """Carries out an order, in the thread of the workers. Orders begin by their numbers, from 0 on, without a gap.

        Ray begins a call when its arguments have come, and so not in the order in which calls were made: ranks that meet in
        collectives would wait for each other in different calls.
        """
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: number == self._next)
            self._next += 1
            self._arrivals.notify_all()
        self._worker = self._worker or Worker(self._seat)
        try:
            return await answer(self._worker.obey(unpacked(value)))
        except SystemExit as error:  # as of a process; Ray would keep it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.code if isinstance(error.code, int) else 1)

    @ray.method(concurrency_group=WATCH)
    async def place(self) -> Place:
        return Place(self._seat, os.getpid(), untyped.util.get_node_ip_address())

    @ray.method(concurrency_group=WATCH)
    async def live(self) -> None:
        """Ends when the process does."""
        await asyncio.Event().wait()

    @ray.method(concurrency_group=WATCH)
    async def question(self, queue: str) -> tuple[int, Packed]:
        """Something that a worker asks of the queue of that name."""
        return await asyncio.wrap_future(mailbox(queue).question())

    @ray.method(concurrency_group=WATCH)
    async def answer(self, queue: str, number: int, fine: bool, value: Packed) -> None:
        mailbox(queue).answer(number, (fine, value))

    @ray.method(concurrency_group=WATCH)
    async def close(self, queue: str) -> None:
        mailbox(queue).close()

    @ray.method(concurrency_group=WATCH)
    async def stacks(self) -> str:
        return self._worker.stacks() if self._worker else "no order has come"
