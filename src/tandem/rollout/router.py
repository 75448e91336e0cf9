"""Several engines as one: which of them samples a request, and which goes on with it when that one may not or cannot.

    generate -> the engine of its group, else the admitted one with the fewest requests -> chunks -> last chunk
                         |  its process is gone, or it was left out: aborted there
                         '-> the same request, with the tokens that it has, on another engine

A request that is continued is the undisturbed one to the last bit where engines are batch-invariant, so that nobody can see how
many engines there are. Who is admitted is the CheckpointEngine's to say, which calls `look` when it has decided; while it hands
weights out nobody is, and new requests wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from tandem.errors import EngineError, StalledError, WorkerError
from tandem.ports import Held, Place, RolloutEngine, WeightSource
from tandem.rollout.requests import check_request
from tandem.types import Chunk, GenerateRequest, GroupKey, Key, Metrics, PolicyRef
from tandem.weights import WeightBlock

R = TypeVar("R")

_GONE = (WorkerError, StalledError)  # of an engine that cannot be reached


class Admission(Protocol):
    """As much of a CheckpointEngine as is needed here."""

    @property
    def admitted(self) -> Sequence[RolloutEngine]: ...


@dataclass(eq=False)
class _Member:
    """An engine and the requests that are there. lent: it is there for a while only; open: now. lost: why it cannot be reached."""

    engine: RolloutEngine
    lent: bool = False
    open: bool = True
    live: dict[_Stream, None] = field(default_factory=dict["_Stream", None])
    lost: str = ""


@dataclass(eq=False)
class _Stream:
    """A request that has not ended. tokens: sampled so far. moves: it is to go on elsewhere when its engine has let it go."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list[int])
    began_s: float = field(default_factory=time.monotonic)
    moves: bool = False
    aborted: bool = False

    @property
    def left_s(self) -> float | None:
        """Until its deadline, if it has one."""
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else max(0.0, self.began_s + deadline_s - time.monotonic())

    def rest(self) -> GenerateRequest:
        """What is left to be sampled, as a request."""
        asked = self.request
        tokens, sampled = (*asked.tokens, *self.tokens), asked.sampled + len(self.tokens)
        return replace(asked, tokens=tokens, sampled=sampled, deadline_s=self.left_s)


class Router:
    """Implements ports.RolloutEngine over the engines that `serve` names; nothing is sampled before.

    vocab_size, max_context, capabilities: of each of them.
    """

    def __init__(self, *, vocab_size: int, max_context: int, capabilities: frozenset[str]) -> None:
        self.vocab_size, self.max_context, self.capabilities = vocab_size, max_context, capabilities
        self._members: list[_Member] = []
        self._admission: Admission | None = None
        self._homes: dict[GroupKey, _Member] = {}
        self._changed = asyncio.Event()
        self._waiting: dict[_Stream, None] = {}
        self._aborting: set[asyncio.Task[object]] = set()
        self._num_moved = self._sampled = self._again = 0
        self._closed = False

    def serve(self, engines: Sequence[RolloutEngine], admission: Admission, lent: Sequence[RolloutEngine] = ()) -> None:
        """These engines, of which only those are sampled from that are admitted. lent: others, which come with `lend`."""
        self._members = [*map(_Member, engines), *(_Member(engine, lent=True, open=False) for engine in lent)]
        self._admission = admission

    @property
    def num_own(self) -> int:
        """Engines that are there all the time."""
        return sum(not member.lent for member in self._members)

    async def lend(self) -> None:
        """Engines that are lent come: groups move to them until each has its share, first those that have fewest tokens."""
        for member in self._members:
            if member.lent:
                member.open = True
                await self._ask(member, lambda engine: engine.resume())
        self._balance()
        self._tell()

    async def take_back(self) -> None:
        """Engines that are lent stand still when this returns; their requests go on elsewhere."""
        for member in self._members:
            if member.lent and member.open:
                member.open = False
                keys = self._moving(list(member.live))
                await self._ask(member, lambda engine, keys=keys: engine.abort(keys))
                await self._ask(member, lambda engine: engine.pause())  # and what it said has arrived

    def account(self) -> tuple[int, int]:
        """Since the last time: tokens that engines that are lent have sampled, and tokens, of prompts and partial answers, that
        another engine had to compute again since a request moved.
        """
        found, self._sampled, self._again = (self._sampled, self._again), 0, 0
        return found

    def look(self) -> Metrics:
        """Who is admitted may have changed: requests leave an engine that is not, and those that waited may begin.

        What happened since the last time: requests that were moved.
        """
        admitted = self._admitted()
        for member in self._members:
            if member in admitted:
                member.lost = ""
            elif admitted and member.live:
                self._clear(member, list(member.live))
        self._tell()
        moved, self._num_moved = self._num_moved, 0
        return Metrics.sum({"rollout/moved_requests": moved})

    # -------------------------------------------------------------------------------------------------- the port

    @property
    def policy(self) -> PolicyRef:
        return max((member.engine.policy for member in self._members), default=PolicyRef())

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """See the port. Raises EngineError in the end where no engine is left that could go on."""
        self._check_open(request)
        check_request(request, vocab_size=self.vocab_size, max_context=self.max_context, policy=self.policy)
        return self._chunks(request)

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        await self._each(lambda engine: engine.load_weights(source, policy))

    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held:
        """Raises EngineError where the engines do not hold the same."""
        found = await self._each(lambda engine: engine.held(blocks, rows))
        if (different := len({each.wire_hashes for each in found})) != 1:
            raise EngineError(f"{len(found)} engines can be reached, and hold {different} different versions of weights")
        return found[0]

    async def pause(self) -> None:
        await self._each(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

    async def abort(self, keys: Collection[Key]) -> None:
        wanted = frozenset(keys)
        for stream in (*self._waiting, *(stream for member in self._members for stream in member.live)):
            stream.aborted = stream.aborted or stream.request.key in wanted
        self._tell()
        await self._each(lambda engine: engine.abort(wanted))

    async def place(self, where: Place) -> Mapping[str, int]:
        there = Counter[str]()
        for held in await self._each(lambda engine: engine.place(where)):
            there.update(held)
        return there

    async def close(self) -> None:
        self._closed = True
        self._tell()
        await self._each(lambda engine: engine.close())

    # ------------------------------------------------------------------------------------------------- a request

    def _check_open(self, request: GenerateRequest) -> None:
        if self._closed:
            raise EngineError(f"request {request.key}: the engine is closed")

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self._check_open(request)
        stream, moved, begun = _Stream(request), False, False
        while (member := await self._choose(stream)) is not None:
            rest = stream.rest()
            self._num_moved += moved
            self._again += begun * len(rest.tokens)
            member.live[stream], moved, begun = None, True, False
            try:
                async with aclosing(member.engine.generate(rest)) as chunks:
                    async for chunk in chunks:
                        stream.tokens += chunk.tokens
                        self._sampled += member.lent * len(chunk.tokens)
                        begun = begun or bool(chunk.tokens)
                        if chunk.stop == "abort" and stream.moves and not stream.aborted:
                            if chunk.tokens:
                                yield replace(chunk, stop=None)
                            break
                        yield chunk
                        if chunk.stop is not None:
                            return
            except _GONE as error:
                member.lost = str(error)
            finally:
                del member.live[stream]
                self._leave(member, request.key.group)
            stream.moves = False
        yield Chunk((), (), self.policy, "abort")

    async def _choose(self, stream: _Stream) -> _Member | None:
        """Waits for an engine that is admitted; None where the request was aborted meanwhile, or is not to go on.

        Raises EngineError where those that are admitted cannot be reached: no other will be, as long as nothing is sampled.
        """
        group = stream.request.key.group
        self._waiting[stream] = None
        try:
            async with asyncio.timeout(stream.left_s):
                while not stream.aborted and not self._closed:
                    admitted = self._admitted()
                    if there := [member for member in admitted if not member.lost]:
                        home = self._homes.get(group)
                        if home not in there:
                            home = self._homes[group] = min(there, key=lambda member: len(member.live))
                        return home
                    if admitted:
                        why = "; ".join(member.lost for member in admitted)
                        raise EngineError(f"request {stream.request.key}: no rollout engine is left to sample it: {why}")
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            del self._waiting[stream]
        return None

    def _leave(self, member: _Member, group: GroupKey) -> None:
        """A group is at home where one of its requests is."""
        if self._homes.get(group) is member and all(stream.request.key.group != group for stream in member.live):
            del self._homes[group]

    def _balance(self) -> None:
        """Groups move to engines that are lent until each has its share."""
        there = [member for member in self._admitted() if not member.lost]
        share = sum(len(member.live) for member in there) // max(1, len(there))
        for to in (member for member in there if member.lent):
            room = share - len(to.live)
            for member in there:
                groups: dict[GroupKey, list[_Stream]] = {}
                for stream in member.live:
                    groups.setdefault(stream.request.key.group, []).append(stream)
                spare, moving = len(member.live) - share, list[_Stream]()
                for group, streams in sorted(groups.items(), key=lambda each: sum(len(stream.tokens) for stream in each[1])):
                    if len(streams) <= min(room, spare):
                        self._homes[group] = to
                        moving += streams
                        room, spare = room - len(streams), spare - len(streams)
                self._clear(member, moving)

    def _clear(self, member: _Member, streams: Sequence[_Stream]) -> None:
        """These requests are to go on elsewhere."""
        if not streams:
            return
        keys = self._moving(streams)
        aborting = asyncio.ensure_future(self._ask(member, lambda engine: engine.abort(keys)))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    def _moving(self, streams: Sequence[_Stream]) -> list[Key]:
        """These are to go on elsewhere when they are aborted."""
        for stream in streams:
            stream.moves = True
        return [stream.request.key for stream in streams]

    def _admitted(self) -> list[_Member]:
        allowed = self._admission.admitted if self._admission is not None else ()
        return [member for member in self._members if member.open and any(member.engine is engine for engine in allowed)]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ----------------------------------------------------------------------------------------------- all engines

    async def _each(self, call: Callable[[RolloutEngine], Awaitable[R]]) -> list[R]:
        """What each engine answers that can be reached."""
        answers = await asyncio.gather(*(self._ask(member, call) for member in self._members if not member.lost))
        return [answer for (answer,) in filter(None, answers)]

    async def _ask(self, member: _Member, call: Callable[[RolloutEngine], Awaitable[R]]) -> tuple[R] | None:
        try:
            return (await call(member.engine),)
        except _GONE as error:
            member.lost = str(error)
            return None
