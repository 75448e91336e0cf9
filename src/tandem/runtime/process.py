"""The runtime of one machine: ranks are processes, and a call is a message.

    runtime -- pools of processes -- groups of workers, one worker a process; groups of one pool share its processes

A pool lives and dies whole. A worker that dies is an error that names it and shows the end of its log, and ends the pool,
since its peers would wait for it; so does a call in which nothing moves for its limit, and one that failed on a rank while
its peers wait for that rank in a collective. Whoever still calls into an ended pool gets the same error again.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from tandem.durable import attempt
from tandem.errors import RunError, StalledError, WorkerError
from tandem.runtime.dispatch import Call, checked, gather, registered, scatter
from tandem.runtime.forkserver import ForkServer, fork_server
from tandem.runtime.link import Link, Question, pack, pair
from tandem.runtime.placement import Rank, Seat
from tandem.runtime.worker import Build, Do, Join, Order, Stacks

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")

_SLICES = 10  # an event loop that is busy with something else uses up one of them and not the limit
_STACKS_LIMIT_S = 2.0
_PEERS_LIMIT_S = 5.0  # that ranks have to finish a call which failed on another, before they count as stuck
_KILL_LIMIT_S = 10.0
_LOG_LINES, _LOG_BYTES = 15, 8 << 10


class Processes:
    """The process runtime, for the length of an `async with`. Groups are declared before, and their workers built as it begins.

    seats: as `placement.place` made them. logs: a directory for one file a process. limit_s: how long a call may wait while no
    rank answers; longer than the slowest step.
    """

    def __init__(self, seats: Sequence[Seat], logs: Path, *, limit_s: float = 600.0) -> None:
        self._logs = logs
        pools = {name: [seat for seat in seats if seat.pool == name] for name in dict.fromkeys(seat.pool for seat in seats)}
        self._pools = {name: _Pool(name, its, logs, limit_s) for name, its in pools.items()}
        self._declared: list[tuple[ProcessGroup, str, tuple[object, ...]]] = []

    def group(
        self, role: str, pool: str, factory: str, *arguments: object, replicas: int = 1, collectives: bool = False
    ) -> ProcessGroup:
        """A worker for `role` in every process of a pool, made there by `factory(rank, *arguments)`; arguments are pickled.

        factory: "package.module:attr" or "path/file.py:attr". replicas: how many neighbours share their rows. collectives: the
        ranks meet in a torch.distributed process group, and calls run one after the other.
        """
        if pool not in self._pools:
            raise RunError(f"there is no pool {pool!r} for role {role!r}; there are {', '.join(self._pools) or 'none'}")
        processes = self._pools[pool]
        if processes.started:
            raise RunError(f"role {role!r} comes too late: groups are declared before their runtime starts")
        group = ProcessGroup(role, processes, checked(len(processes), replicas), collectives)
        self._declared.append((group, factory, arguments))
        return group

    async def __aenter__(self) -> Self:
        """Starts every process and builds every worker, or leaves no process behind."""
        with attempt(f"make the directory {self._logs}", self._logs):
            self._logs.mkdir(parents=True, exist_ok=True)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._close)
            for pool in self._pools.values():
                await pool.start()
            while self._declared:
                group, factory, arguments = self._declared.pop(0)
                await group.build(factory, arguments)
            undo.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._close()

    async def _close(self) -> None:
        """Ends every process, and waits until none is left."""
        await asyncio.gather(*(pool.end("the runtime was closed") for pool in self._pools.values() if pool.started))


class ProcessGroup:
    """Implements ports.WorkerGroup over the processes of a pool; made by `Processes.group`."""

    def __init__(self, role: str, pool: _Pool, replicas: int, collectives: bool) -> None:
        self._role = role
        self._pool = pool
        self._replicas = replicas
        self._collectives = collectives

    @property
    def size(self) -> int:
        return len(self._pool)

    async def build(self, factory: str, arguments: tuple[object, ...]) -> None:
        """Makes the worker of each rank, in its process."""
        if self._collectives:
            await self._pool.join()
        ranks = [Rank(index, self.size, self._replicas) for index in range(self.size)]
        builds = [Build(self._role, rank, factory, arguments, self._collectives) for rank in ranks]
        await self._pool.order(f"building the workers of {self._role}", builds, stuck=self._collectives)

    async def call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        name, dispatch, collect = registered(method)
        results = await self._all(name, scatter(dispatch, args, kwargs, self.size, self._replicas))
        return gather(results, dispatch, collect, self._replicas, (args, kwargs))

    async def call_each(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return await self._all(registered(method)[0], [(args, kwargs)] * self.size)

    async def _all(self, name: str, calls: Sequence[Call]) -> list[Any]:
        """Of the first ranks, as many as there are calls."""
        made = {id(call): Do(self._role, name, *call) for call in calls}
        return await self._pool.order(f"{self._role}.{name}", [made[id(call)] for call in calls], stuck=self._collectives)


@dataclass(frozen=True, slots=True)
class _Process:
    seat: Seat
    pid: int
    link: Link
    log: Path

    def __str__(self) -> str:
        return f"rank {self.seat.rank} (process {self.pid} on {platform.node()})"

    def log_end(self) -> str:
        """The last lines of what it wrote."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        except OSError as error:
            return f"{self.log} cannot be read: {error}."
        return (
            f"The end of {self.log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else f"It wrote nothing to {self.log}."
        )


class _Pool:
    """The processes of one pool, in the order of their ranks. Belongs to the event loop that starts it."""

    def __init__(self, name: str, seats: Sequence[Seat], logs: Path, limit_s: float) -> None:
        self.started = False
        self._name = name
        self._seats = tuple(seats)
        self._logs = logs
        self._store = logs / f".{name}-meets-{os.getpid()}"
        self._limit_s = limit_s
        self._processes: list[_Process] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._ending = False
        self._joined = False

    def __len__(self) -> int:
        return len(self._seats)

    async def start(self) -> None:
        if self.started:
            raise RunError(f"pool {self._name!r} was started before; a runtime is for one `async with`")
        self.started = True
        self._server: ForkServer = fork_server()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why, when no process is left
        for seat in self._seats:
            path = self._logs / f"{self._name}-{seat.rank}.log"
            with ExitStack() as undo:
                ours, theirs = pair()
                undo.callback(ours.close)
                with attempt(f"open {path}", path), theirs, path.open("wb") as log:
                    pid = await self._server.fork(seat, theirs, log.fileno())
                undo.pop_all()
            process = _Process(seat, pid, Link(ours, _asks_nothing), path)
            self._processes.append(process)
            self._watchers.append(asyncio.create_task(self._watch(process)))

    async def join(self) -> None:
        """The ranks meet for collectives, once; they keep the file, through which new process groups of theirs meet too."""
        if self._joined:
            return
        self._joined = True
        self._store.unlink(missing_ok=True)
        joins = [Join(index, len(self), self._store, self._limit_s) for index in range(len(self))]
        await self.order(f"pool {self._name}: its ranks meeting", joins, stuck=True)

    async def order(self, what: str, orders: Sequence[Order], *, stuck: bool) -> list[Any]:
        """Each order to one rank, from the first on; the answers. What is one object is sent once.

        stuck: a rank that waits for one that failed would wait for ever. Raises what a rank raised; WorkerError where a process
        died or the pool has ended; StalledError where no rank answers for the limit.
        """
        if not self.started:
            raise WorkerError(f"{what} cannot be called: the runtime of pool {self._name!r} has not started")
        if self._ended.done():
            raise WorkerError(f"{what} cannot be called: {self._ended.result()}")
        distinct = {id(order): order for order in orders}
        parcels = dict(zip(distinct, await asyncio.gather(*map(pack, distinct.values())), strict=True))
        answers = [
            asyncio.wrap_future(process.link.ask(parcels[id(order)]))
            for process, order in zip(self._processes, orders, strict=False)
        ]
        for parcel in parcels.values():
            parcel.close()
        try:
            return await self._collect(what, answers, stuck=stuck)
        finally:
            for answer in answers:
                if not answer.cancel():
                    answer.exception()  # seen

    async def _collect(self, what: str, answers: Sequence[asyncio.Future[Any]], *, stuck: bool) -> list[Any]:
        pending: set[asyncio.Future[Any]] = set(answers)
        failed: BaseException | None = None
        lost = False
        quiet = 0
        while (pending and (stuck or failed is None)) or lost:
            limit_s = self._limit_s if failed is None and not lost else _PEERS_LIMIT_S
            done, _ = await asyncio.wait({*pending, self._ended}, timeout=limit_s / _SLICES, return_when=asyncio.FIRST_COMPLETED)
            if self._ended in done:
                raise WorkerError(f"{what}: {self._ended.result()}")
            quiet = 0 if done else quiet + 1
            if quiet == _SLICES:
                break
            pending -= done
            errors = [error for answer in done if (error := answer.exception()) is not None]
            lost = lost or any(isinstance(error, ConnectionError) for error in errors)  # _watch says more in a moment
            failed = failed or next((error for error in errors if not isinstance(error, ConnectionError)), None)
        waiting = [process for process, answer in zip(self._processes, answers, strict=False) if answer in pending]
        if failed is not None:
            if waiting and stuck:
                await self.end(f"{what} failed on a rank for which others waited: {failed}")
            raise failed
        if waiting or lost:
            raise await self._stalled(what, waiting)
        return [answer.result() for answer in answers]

    async def _stalled(self, what: str, waiting: Sequence[_Process]) -> StalledError:
        stacks = await asyncio.gather(*map(self._stacks, waiting))
        await self.end(f"{what} stalled")
        message = (
            f"{what}: nothing moved for {self._limit_s:g} s; {len(waiting)} of {len(self)} ranks have not answered, and were ended"
        )
        return StalledError("\n\n".join([message, *(f"{process}: {text}" for process, text in zip(waiting, stacks, strict=True))]))

    async def _stacks(self, process: _Process) -> str:
        """Where a process stands, from its links' thread; where that has no turn, from the signal that dumps all threads."""
        try:
            async with asyncio.timeout(_STACKS_LIMIT_S):
                return await process.link.call(Stacks())
        except (TimeoutError, ConnectionError):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            await asyncio.sleep(_STACKS_LIMIT_S / _SLICES)
            return f"it does not say where it stands: stopped, or in native code that keeps the interpreter. {process.log_end()}"

    async def _watch(self, process: _Process) -> None:
        """Waits for the end of a process; where nobody asked for it, ends its peers."""
        try:
            code = await self._server.ended(process.pid)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except ConnectionError:
            how = "was ended with the fork server, which died"
        if self._ending:
            return
        left = await self._kill()
        peers = ", and its peers were ended" if len(self) > 1 else ""
        self._ended.set_result(f"{process} {how}{peers}{left}. {process.log_end()}")

    async def end(self, why: str) -> None:
        """Ends every process; the reason is the error of whoever still calls."""
        if not self._ending:
            left = await self._kill()
            self._ended.set_result(f"pool {self._name!r} has ended: {why}{left}")
        await self._ended

    async def _kill(self) -> str:
        """Ends every process. Which ones are left, as the end of a sentence: none, but where the kernel itself is stuck."""
        self._ending = True
        with suppress(ConnectionError):
            await asyncio.gather(*(self._server.kill(process.pid) for process in self._processes))
        going = [asyncio.ensure_future(self._gone(process)) for process in self._processes]
        _, stuck = await asyncio.wait(going, timeout=_KILL_LIMIT_S) if going else ((), ())
        for task in stuck:
            task.cancel()
        for process in self._processes:
            process.link.close()
        self._store.unlink(missing_ok=True)
        return f"; {len(stuck)} of {len(self)} processes were killed and do not end (state D in ps?)" if stuck else ""

    async def _gone(self, process: _Process) -> None:
        with suppress(ConnectionError):
            await self._server.ended(process.pid)


def _asks_nothing(value: object, question: Question) -> None:
    question.fail(WorkerError("a controller is asked nothing by its workers"))
