"""The runtime of one machine: ranks are processes that a fork server made, and a call is a message over a link."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.durable import attempt
from tandem.errors import WorkerError
from tandem.runtime.forkserver import ForkServer, fork_server
from tandem.runtime.keeper import log_end
from tandem.runtime.link import Link, Question, pack, pair
from tandem.runtime.placement import Seat
from tandem.runtime.pool import Pool, Runtime
from tandem.runtime.worker import Order, Stacks

_STACKS_LIMIT_S = 2.0
_DUMP_S = 0.2  # that a process has to dump its stacks
_KILL_LIMIT_S = 10.0


class Processes(Runtime["_ProcessPool"]):
    """The process runtime.

    seats: as `placement.place` made them. logs: a directory for one file a process. limit_s: how long a call may wait while no
    rank answers; longer than the slowest step. spare: pools that can be done without as long as one of them lives.
    """

    def __init__(self, seats: Sequence[Seat], logs: Path, *, limit_s: float = 600.0, spare: Collection[str] = ()) -> None:
        self._logs = logs = logs.resolve()
        pools = {name: [seat for seat in seats if seat.pool == name] for name in dict.fromkeys(seat.pool for seat in seats)}
        super().__init__({name: _ProcessPool(name, its, logs, limit_s) for name, its in pools.items()}, spare)

    async def _prepare(self, undo: AsyncExitStack) -> None:
        with attempt(f"make the directory {self._logs}", self._logs):
            self._logs.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class _Process:
    seat: Seat
    pid: int
    link: Link
    log: Path
    server: ForkServer

    def __str__(self) -> str:
        return f"rank {self.seat.rank} (process {self.pid} on {platform.node()})"

    async def stacks(self) -> str:
        """From its links' thread; where that has no turn, from the signal that dumps all threads."""
        try:
            async with asyncio.timeout(_STACKS_LIMIT_S):
                return await self.link.call(Stacks())
        except (TimeoutError, ConnectionError):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            await asyncio.sleep(_DUMP_S)
            log = await self.log_end()
            return f"it does not say where it stands: stopped, or in native code that keeps the interpreter. {log}"

    async def death(self) -> str:
        try:
            code = await self.server.ended(self.pid)
        except ConnectionError:
            return "was ended with the fork server, which died"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    async def log_end(self) -> str:
        return log_end(self.log)


class _ProcessPool(Pool[_Process]):
    def __init__(self, name: str, seats: Sequence[Seat], logs: Path, limit_s: float) -> None:
        super().__init__(name, len(seats), limit_s)
        self._seats = tuple(seats)
        self._logs = logs
        self._store = logs / f".{name}-meets"

    def again(self) -> _ProcessPool:
        return _ProcessPool(self._name, self._seats, self._logs, self._limit_s)

    async def _start(self) -> None:
        self._server = fork_server()
        for seat in self._seats:
            path = self._logs / f"{self._name}-{seat.rank}.log"
            with ExitStack() as undo:
                ours, theirs = pair()
                undo.callback(ours.close)
                with attempt(f"open {path}", path), theirs, path.open("wb") as log:
                    pid = await self._forked(seat, theirs, log.fileno())
                undo.pop_all()
            self._add(_Process(seat, pid, Link(ours, _asks_nothing), path, self._server))

    async def _forked(self, seat: Seat, end: socket.socket, log: int) -> int:
        try:
            return await self._server.fork(seat, end, log)
        except ConnectionError:
            self._announce_death("the fork server died while it loaded torch or forked; what it wrote to stderr says why")
            raise WorkerError(self.death) from None

    async def _meet(self) -> Path:
        self._store.unlink(missing_ok=True)
        return self._store

    async def _send(self, orders: Sequence[Order]) -> list[asyncio.Future[Any]]:
        distinct = {id(order): order for order in orders}
        parcels = dict(zip(distinct, await asyncio.gather(*map(pack, distinct.values())), strict=True))
        answers = [
            asyncio.wrap_future(process.link.ask(parcels[id(order)])) for process, order in zip(self._members, orders, strict=False)
        ]
        for parcel in parcels.values():
            parcel.close()
        return answers

    async def _kill(self) -> str:
        with suppress(ConnectionError):
            await asyncio.gather(*(self._server.kill(process.pid) for process in self._members))
        going = [asyncio.ensure_future(process.death()) for process in self._members]
        _, stuck = await asyncio.wait(going, timeout=_KILL_LIMIT_S) if going else ((), ())
        for task in stuck:
            task.cancel()
        for process in self._members:
            process.link.close()
        self._store.unlink(missing_ok=True)
        return f"; {len(stuck)} of {len(self)} processes were killed and do not end (state D in ps?)" if stuck else ""


def _asks_nothing(value: object, question: Question) -> None:
    question.fail(WorkerError("a controller is asked nothing by its workers"))
