"""What every runtime with processes of its own has in common: runtime, pools of processes, groups of workers.

    runtime -- pools of processes -- groups of workers, one worker a process; groups of one pool share its processes

A pool lives and dies whole. A worker that dies is an error that names it and shows the end of its log, and ends the pool,
since its peers would wait for it; so does a call in which nothing moves for its limit, and one that failed on a rank while
its peers wait for that rank in a collective. Whoever still calls into an ended pool gets the same error again, unless another
pool was put into the place of one that can be done without.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from tandem.device import Address
from tandem.errors import RunError, StalledError, WorkerError
from tandem.faults import crash_point
from tandem.runtime.dispatch import Call
from tandem.runtime.group import Group
from tandem.runtime.placement import Rank
from tandem.runtime.worker import Build, Do, Join, Order

_SLICES = 10  # an event loop that is busy with something else uses up one of them and not the limit
_PEERS_LIMIT_S = 5.0  # that ranks have to finish a call which failed on another, before they count as stuck
_TRIES = 3  # at a new pool in the place of one that died, in a row, none of which lived from one `returned` to the next


class Member(Protocol):
    """One process of a pool as its controller sees it; `str` names its rank, itself and its node."""

    async def stacks(self) -> str:
        """Where it stands; never waits for long."""
        ...

    async def death(self) -> str:
        """Waits until it is gone: how it went, as the rest of a sentence about it."""
        ...

    async def log_end(self) -> str:
        """The last lines of what it wrote."""
        ...


M = TypeVar("M", bound=Member)


class Pool(ABC, Generic[M]):
    """The processes of one pool, in the order of their ranks. Belongs to the event loop that starts it."""

    def __init__(self, name: str, size: int, limit_s: float) -> None:
        self.started = False
        self.death = ""  # who died that nobody ended, how, and the end of its log, as sentences
        self.died: Callable[[], None] = lambda: None  # is called then
        self._name = name
        self._size = size
        self._limit_s = limit_s
        self._members: list[M] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._ending = False
        self._joined = False

    def __len__(self) -> int:
        return self._size

    async def start(self) -> None:
        """Starts the processes, those that `end` ends. Raises RunError the second time."""
        if self.started:
            raise RunError(f"pool {self._name!r} was started before; a runtime is for one `async with`")
        self.started = True
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why, when no process is left
        await self._start()

    @abstractmethod
    def again(self) -> Self:
        """A pool in the same place, that has not started."""

    @property
    def ended(self) -> str:
        """Why no process is left, if that is so."""
        return self._ended.result() if self._ended.done() else ""

    @abstractmethod
    async def _start(self) -> None:
        """Starts every process and calls `_add` with it."""

    @abstractmethod
    async def _meet(self) -> Path | Address:
        """A place where the ranks have not met yet."""

    @abstractmethod
    async def _send(self, orders: Sequence[Order]) -> list[asyncio.Future[Any]]:
        """Each order to one rank, from the first on, what is one object once; the answers, ConnectionError where a rank is gone."""

    @abstractmethod
    async def _kill(self) -> str:
        """Ends every process. Which ones are left, as the end of a sentence: none, but where a kernel itself is stuck."""

    def _add(self, member: M) -> None:
        """From now on the death of this process ends its peers, where nobody asked for it."""
        self._members.append(member)
        self._watchers.append(asyncio.create_task(self._mourn(member)))

    async def _mourn(self, member: Member) -> None:
        how = await member.death()
        if self._ending:
            return
        self._ending = True
        left = await self._kill()
        peers = ", and its peers were ended" if len(self) > 1 else ""
        went, log = f"{how}{peers}{left}", await member.log_end()
        self._ended.set_result(f"{member} {went}. {log}")
        self._announce_death(f"{member} of pool {self._name} {went}. {log}")

    def _announce_death(self, death: str) -> None:
        self.death = death
        self.died()

    async def join(self) -> None:
        """The ranks meet for collectives, once; what they met at stays, since new process groups of theirs meet there too."""
        if self._joined:
            return
        self._joined = True
        meet = await self._meet()
        joins = [Join(index, len(self), meet, self._limit_s) for index in range(len(self))]
        await self.order(f"pool {self._name}: its ranks meeting", joins, stuck=True)

    async def order(self, what: str, orders: Sequence[Order], *, stuck: bool) -> list[Any]:
        """Each order to one rank, from the first on; the answers.

        stuck: a rank that waits for one that failed would wait for ever. Raises what a rank raised; WorkerError where a process
        died or the pool has ended; StalledError where no rank answers for the limit.
        """
        if not self.started:
            raise WorkerError(f"{what} cannot be called: the runtime of pool {self._name!r} has not started")
        if self._ended.done():
            raise WorkerError(f"{what} cannot be called: {self._ended.result()}")
        crash_point("order.before")
        answers = await self._send(orders)
        crash_point("order.sent")
        try:
            return await self._collect(what, answers, stuck=stuck)
        finally:
            for answer in answers:
                if not answer.cancel() and not answer.cancelled():
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
            lost = lost or any(isinstance(error, ConnectionError) for error in errors)  # _mourn says more in a moment
            failed = failed or next((error for error in errors if not isinstance(error, ConnectionError)), None)
        waiting = [member for member, answer in zip(self._members, answers, strict=False) if answer in pending]
        if failed is not None:
            if waiting and stuck:
                await self.end(f"{what} failed on a rank for which others waited: {failed}")
            raise failed
        if waiting or lost:
            raise await self._stalled(what, waiting)
        crash_point("order.answered")
        return [answer.result() for answer in answers]

    async def _stalled(self, what: str, waiting: Sequence[Member]) -> StalledError:
        stacks = await asyncio.gather(*(member.stacks() for member in waiting))
        await self.end(f"{what} stalled")
        message = (
            f"{what}: nothing moved for {self._limit_s:g} s; {len(waiting)} of {len(self)} ranks have not answered, and were ended"
        )
        return StalledError("\n\n".join([message, *(f"{member}: {text}" for member, text in zip(waiting, stacks, strict=True))]))

    async def end(self, why: str) -> None:
        """Ends every process; the reason is the error of whoever still calls."""
        if not self._ending:
            self._ending = True
            left = await self._kill()
            self._ended.set_result(f"pool {self._name!r} has ended: {why}{left}")
        await self._ended


class PoolGroup(Group):
    """Implements ports.WorkerGroup over the processes of a pool; made by `Runtime.group`."""

    def __init__(self, role: str, pool: Pool[Any], replicas: int, collectives: bool) -> None:
        super().__init__(len(pool), replicas)
        self._role = role
        self._pool = pool
        self._collectives = collectives

    async def build(self, pool: Pool[Any], factory: str, arguments: tuple[object, ...]) -> None:
        """Makes the worker of each rank, in its process of the pool: this group's own, or one that is to take its place."""
        if self._collectives:
            await pool.join()
        ranks = [Rank(index, self.size, self._replicas) for index in range(self.size)]
        builds = [Build(self._role, rank, factory, arguments, self._collectives) for rank in ranks]
        await pool.order(f"building the workers of {self._role}", builds, stuck=self._collectives)

    def move(self, pool: Pool[Any]) -> None:
        """From now on calls go to the workers that were built there."""
        self._pool = pool

    async def _all(self, method: str, calls: Sequence[Call]) -> list[Any]:
        made = {id(call): Do(self._role, method, *call) for call in calls}
        return await self._pool.order(f"{self._role}.{method}", [made[id(call)] for call in calls], stuck=self._collectives)


Q = TypeVar("Q", bound=Pool[Any])


class Runtime(ABC, Generic[Q]):
    """Pools of processes, for the length of an `async with`. Groups are declared before, and their workers built as it begins.

    spare: names of pools that can be done without as long as one of them lives, once all were there. Where one of them dies, a new
    one is started and its workers are built while everything goes on; `returned` puts it into its place. tell: is called with a
    sentence when one dies and when one is there again. death: who died first that nobody ended and nobody could do without, how,
    and the end of its log, as sentences; "" where none did. It stays, also after the end.
    """

    def __init__(self, pools: Mapping[str, Q], spare: Collection[str] = ()) -> None:
        self.tell: Callable[[str], None] = lambda said: None
        self.death = ""
        self._pools, self._spare = dict(pools), frozenset(spare)
        self._complete = False
        self._died = asyncio.Event()
        self._coming: dict[str, asyncio.Task[Q]] = {}
        self._tries = Counter[str]()
        for name, pool in pools.items():
            pool.died = partial(self._pool_died, name)
        self._declared: list[tuple[str, PoolGroup, str, tuple[object, ...]]] = []

    def _pool_died(self, name: str) -> None:
        spare = name in self._spare and self._complete and not all(self._pools[each].ended for each in self._spare)
        if spare and not self.death:
            self._replace(name, self._pools[name].death)
        else:
            self.death = self.death or self._pools[name].death
            self._died.set()

    async def lost(self) -> None:
        """Raises WorkerError as soon as there is a `death`."""
        await self._died.wait()
        raise WorkerError(self.death)

    def group(
        self, role: str, pool: str, factory: str, *arguments: object, replicas: int = 1, collectives: bool = False
    ) -> PoolGroup:
        """A worker for `role` in every process of a pool, made there by `factory(rank, *arguments)`; arguments are pickled.

        factory: "package.module:attr" or "path/file.py:attr". replicas: how many neighbours share their rows. collectives: the
        ranks meet in a torch.distributed process group, and calls run one after the other.
        """
        if pool not in self._pools:
            raise RunError(f"there is no pool {pool!r} for role {role!r}; there are {', '.join(self._pools) or 'none'}")
        processes = self._pools[pool]
        if processes.started:
            raise RunError(f"role {role!r} comes too late: groups are declared before their runtime starts")
        group = PoolGroup(role, processes, replicas, collectives)
        self._declared.append((pool, group, factory, arguments))
        return group

    # ------------------------------------------------------------------------------------------ a new pool for one that died

    def returned(self) -> list[str]:
        """Names of spare pools that had died and are there again: from now on calls reach workers that know nothing. None after a
        `death`.

        To be asked now and then: what has not come is tried again then, and one that lives until the next time has returned for
        good.
        """
        if self.death:
            return []
        lived, there = [name for name in self._tries if not self._pools[name].ended], list[str]()
        for name, coming in [each for each in self._coming.items() if each[1].done()]:
            del self._coming[name]
            error = coming.exception()
            if why := f"{type(error).__name__}: {error}" if error is not None else coming.result().ended:
                self._replace(name, f"the new one did not live: {why}")
                continue
            self._pools[name] = pool = coming.result()
            pool.died = partial(self._pool_died, name)
            for _, group, *_ in self._of(name):
                group.move(pool)
            self.tell(f"pool {name} is there again, with a new process")
            there.append(name)
        for name in lived:
            del self._tries[name]
        return there

    def _replace(self, name: str, why: str) -> None:
        if self._tries[name] == _TRIES:
            self.tell(f"the run goes on without pool {name} for good, after {_TRIES} tries to start it again: {why}")
            return
        self._tries[name] += 1
        self.tell(f"the run goes on without pool {name} while it is started again (try {self._tries[name]} of {_TRIES}): {why}")
        self._coming[name] = asyncio.create_task(self._new(name), name=f"start pool {name} again")

    async def _new(self, name: str) -> Q:
        pool = self._pools[name].again()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(pool.end, "not all of it came")
            await pool.start()
            for _, group, factory, arguments in self._of(name):
                await group.build(pool, factory, arguments)
            undo.pop_all()
        return pool

    def _of(self, name: str) -> list[tuple[str, PoolGroup, str, tuple[object, ...]]]:
        return [each for each in self._declared if each[0] == name]

    # ------------------------------------------------------------------------------------------ beginning and end

    @abstractmethod
    async def _prepare(self, undo: AsyncExitStack) -> None:
        """What comes before the first process starts, and into `undo` what comes after the last has ended."""

    async def __aenter__(self) -> Self:
        """Starts every process and builds every worker, or leaves no process behind."""
        async with AsyncExitStack() as undo:
            await self._prepare(undo)
            undo.push_async_callback(self._end)
            for pool in self._pools.values():
                await pool.start()
            for name, group, factory, arguments in self._declared:
                await group.build(self._pools[name], factory, arguments)
            self._declared = [each for each in self._declared if each[0] in self._spare]
            self._undo = undo.pop_all()
        self._complete = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends every process, and waits until none is left."""
        await self._undo.aclose()

    async def _end(self) -> None:
        """None that is coming comes any more when those that are there have ended."""
        await asyncio.gather(*(pool.end("the runtime was closed") for pool in self._pools.values() if pool.started))
        for coming in self._coming.values():
            coming.cancel()
        came = await asyncio.gather(*self._coming.values(), return_exceptions=True)
        await asyncio.gather(*(pool.end("the runtime was closed") for pool in came if isinstance(pool, Pool)))
