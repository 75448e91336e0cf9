"""What runs in a worker process: builds workers, one a role, and runs their registered methods until the link closes.

The main thread runs the methods; the links' thread notices the end of the link, and tells where the process stands, in the
middle of a computation too. A role whose ranks meet in collectives runs its calls one after the other, so that all ranks
meet in the same order, but for those that are registered as `beside`; other roles' calls may overlap where they wait.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from tandem import device
from tandem.device import Address
from tandem.errors import RunError
from tandem.faults import crash_point, take_role
from tandem.registry import resolve
from tandem.runtime.link import Link, Question
from tandem.runtime.placement import Beside, Rank, Seat
from tandem.stacks import where

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Build:
    """Make the role's worker: `factory(rank, *arguments)`."""

    role: str
    rank: Rank
    factory: str
    arguments: tuple[Any, ...]
    collectives: bool


@dataclass(frozen=True, slots=True)
class Open:
    """Serve a store at which the ranks of this pool can meet, at this process's `host`; the answer is its address."""

    host: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the other ranks of this pool, for collectives."""

    index: int
    size: int
    meet: Path | Address
    limit_s: float


@dataclass(frozen=True, slots=True)
class Do:
    """Call a registered method of the role's worker."""

    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stacks:
    """Say where this process stands."""


Order: TypeAlias = Build | Open | Join | Do | Stacks


def run(seat: Seat, end: socket.socket, log: int, server: int) -> None:
    """The worker's life, in a process that was just forked by process `server`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        cast("Any", stream).reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(device.visible(seat.kind, seat.devices))
    device.configure_threads(seat.cores)
    asyncio.run(_serve(Worker(seat), end))


async def _serve(worker: Worker, end: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def start(order: Order, question: Question) -> None:
        task = asyncio.ensure_future(question.answer(worker.obey(order)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def receive(order: Order, question: Question) -> None:
        if isinstance(order, Stacks):
            question.reply(worker.stacks())
        else:
            loop.call_soon_threadsafe(start, order, question)

    Link(end, receive, _leave)
    await asyncio.Event().wait()


class Worker:
    """The workers of all roles in one process. Belongs to the thread that makes it; any thread may ask for its stacks."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        take_role(f"{seat.pool}-{seat.rank}")
        self._thread = threading.get_ident()
        self._workers: dict[str, object] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._turn = asyncio.Lock()  # of all roles with collectives: they share the process group
        self._running: dict[Coroutine[Any, Any, object], str] = {}
        self._store: object = None  # is served while it is kept

    async def obey(self, order: Order) -> object:
        work = self._obey(order)
        self._running[work] = f"{order.role}.{order.method}" if isinstance(order, Do) else type(order).__name__.lower()
        crash_point("obey.before")
        try:
            return await work
        finally:
            crash_point("obey.after")
            del self._running[work]

    async def _obey(self, order: Order) -> object:
        match order:
            case Do(role, method, args, kwargs):
                return await self._do(role, method, args, kwargs)
            case Build(role, rank, factory, arguments, collectives):
                given = [self._workers[each.role] if isinstance(each, Beside) else each for each in arguments]
                self._workers[role] = cast("Callable[..., object]", resolve(factory, {}, kind="worker"))(rank, *given)
                if collectives:
                    self._turns[role] = self._turn
            case Open(host, limit_s):
                self._store = store = device.open_store(host, limit_s)
                return Address(host, store.port)
            case Join(index, size, meet, limit_s):
                device.join(device.select("auto" if self._seat.devices else "cpu"), index, size, meet, limit_s)
            case Stacks():
                return self.stacks()
        return None

    async def _do(self, role: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        worker = self._workers[role]
        marked = (vars(kind).get(name) for kind in type(worker).__mro__)
        method = next((method for method in marked if hasattr(method, "__tandem_call__")), None)
        if method is None:
            raise RunError(f"{type(worker).__name__}.{name} is not registered in worker {role!r}; decorate it with @register")
        async with nullcontext() if method.__tandem_beside__ else self._turns.get(role, nullcontext()):
            return await getattr(worker, name)(*args, **kwargs)

    def stacks(self) -> str:
        """Where the worker's thread is, and where each call waits."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] documented, in spite of its name
        parts = ["main thread:\n" + "".join(traceback.format_stack(frames[self._thread]))]
        for work, name in dict(self._running).items():
            parts.append(f"{name}:\n{where(work)}")
        return "\n".join(parts)


def _leave() -> None:
    """The link is closed: nobody waits for what the main thread does."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
