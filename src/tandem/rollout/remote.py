"""An engine that lives in a worker of a WorkerGroup, and who stands for it here.

    generate ----(submit: requests, of one turn of the event loop)----> EngineWorker, each request in a task
        <--------(said: chunks of all requests since the last answer)----------'

One call waits in the worker for what the engine says and brings all of it, so that the busier the link is the more a message
holds. The engine's steps go on meanwhile. It neither chooses an engine nor repeats what was lost with one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Concatenate, ParamSpec, TypeVar

from tandem.errors import EngineError, TandemError, WorkerError
from tandem.ports import Collect, Dispatch, Held, Place, RolloutEngine, WeightSource, WorkerGroup, register
from tandem.rollout.requests import check_request
from tandem.types import Chunk, GenerateRequest, Key, PolicyRef
from tandem.weights import WeightBlock

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")

Said = tuple[int, Chunk | TandemError]
"""The number of a request, and what came of it."""

_QUIET_S = 1.0  # after which a worker that has nothing to say says so


class EngineWorker:
    """The worker: an engine, and what it said that nobody has heard yet."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._unheard: list[Said] = []
        self._num_said = 0
        self._news = asyncio.Event()
        self._loading = asyncio.Lock()

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def submit(self, requests: Sequence[tuple[int, GenerateRequest]], left: Sequence[int]) -> None:
        """Requests by number, in the order in which they get their places; left: whose consumers are gone."""
        for number, request in requests:
            self._reading[number] = reading = asyncio.create_task(self._read(number, request))
            reading.add_done_callback(partial(self._ended, number))
        for number in left:
            if number in self._reading:
                self._reading[number].cancel()

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def said(self) -> list[Said]:
        """All that was said since the last call, in order; waits until there is something, but not for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_QUIET_S):
                await self._news.wait()
        self._news.clear()
        unheard, self._unheard = self._unheard, []
        return unheard

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> PolicyRef:
        """The policy that the engine holds then. One that was given up by its caller is waited for."""
        async with self._loading:
            await self._engine.load_weights(source, policy)
        return self._engine.policy

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held:
        return await self._engine.held(blocks, rows)

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def pause(self) -> int:
        """How much was said before."""
        await self._engine.pause()
        return await self._said_so_far()

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def resume(self) -> None:
        await self._engine.resume()

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def abort(self, keys: Collection[Key]) -> None:
        await self._engine.abort(keys)

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def place(self, where: Place) -> tuple[Mapping[str, int], int]:
        """What is on the device then, and how much was said before."""
        there = await self._engine.place(where)
        return there, await self._said_so_far()

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def close(self) -> int:
        """How much was said in all."""
        await self._engine.close()
        return await self._said_so_far()

    async def _said_so_far(self) -> int:
        await asyncio.sleep(0)  # those who read take what the engine has delivered
        return self._num_said

    async def _read(self, number: int, request: GenerateRequest) -> None:
        async for chunk in self._engine.generate(request):
            self._say(number, chunk)

    def _ended(self, number: int, reading: asyncio.Task[None]) -> None:
        del self._reading[number]
        if not reading.cancelled() and (error := reading.exception()) is not None:
            told = (
                error if isinstance(error, TandemError) else EngineError(f"generation failed with {type(error).__name__}: {error}")
            )
            self._say(number, told)

    def _say(self, number: int, what: Chunk | TandemError) -> None:
        self._unheard.append((number, what))
        self._num_said += 1
        self._news.set()


class RemoteEngine:
    """Implements ports.RolloutEngine over a group of one EngineWorker, from one event loop.

    vocab_size, max_context, capabilities: of the engine there. policy: that it holds at first.

    A request whose worker is gone ends with that WorkerError or StalledError, and so does every call, until `begin_again`.
    """

    def __init__(
        self,
        group: WorkerGroup,
        *,
        vocab_size: int,
        max_context: int,
        capabilities: frozenset[str],
        policy: PolicyRef | None = None,
    ) -> None:
        self.vocab_size, self.max_context, self.capabilities = vocab_size, max_context, capabilities
        self._group, self._policy = group, policy or PolicyRef()
        self._numbers = count()
        self._live: dict[int, asyncio.Queue[Chunk | TandemError]] = {}
        self._asked: list[tuple[int, GenerateRequest]] = []  # and not sent yet
        self._left: list[int] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_heard = 0
        self._heard = asyncio.Event()  # of the answer to come
        self._closed = False

    @property
    def policy(self) -> PolicyRef:
        return self._policy

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks in order, the last with `stop`; submitted when it is first iterated. Raises EngineError at once."""
        self._check_open(request)
        check_request(request, vocab_size=self.vocab_size, max_context=self.max_context, policy=self._policy)
        return self._chunks(request)

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        """The source travels to the worker, and is read there."""
        self._policy = await self._call(EngineWorker.load_weights, source, policy)

    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held:
        return await self._call(EngineWorker.held, blocks, rows)

    async def pause(self) -> None:
        """See the port; what was sampled before has arrived when this returns."""
        await self._until_heard(await self._call(EngineWorker.pause))

    async def resume(self) -> None:
        await self._call(EngineWorker.resume)

    async def abort(self, keys: Collection[Key]) -> None:
        await self._call(EngineWorker.abort, frozenset(keys))

    async def place(self, where: Place) -> Mapping[str, int]:
        there, num_said = await self._call(EngineWorker.place, where)
        await self._until_heard(num_said)
        return there

    async def close(self) -> None:
        """Ends all requests as "abort", also where the worker has ended before."""
        if self._closed:
            return
        self._closed = True
        with suppress(TandemError):
            await self._until_heard(await self._call(EngineWorker.close))
        for chunks in self._live.values():
            chunks.put_nowait(Chunk((), (), self._policy, "abort"))
        self._live.clear()

    def begin_again(self) -> None:
        """The group has a new worker, whose engine holds nothing: what was asked of the one before is lost with it."""
        self._lose(WorkerError("the worker of this request is gone, and there is another one"))
        self._policy, self._num_heard = PolicyRef(), 0

    # ------------------------------------------------------------------------------------------------- requests

    def _check_open(self, request: GenerateRequest) -> None:
        if self._closed:
            raise EngineError(f"request {request.key}: the engine is closed")

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self._check_open(request)
        number = next(self._numbers)
        chunks = self._live[number] = asyncio.Queue[Chunk | TandemError]()
        self._asked.append((number, request))
        self._start("send", self._send)
        self._start("listen", self._listen)
        try:
            while True:
                item = await chunks.get()
                if isinstance(item, TandemError):
                    raise item
                yield item
                if item.stop is not None:
                    return
        finally:
            if self._live.pop(number, None) is not None:
                self._left.append(number)
                self._start("send", self._send)

    # ------------------------------------------------------------------------------------------------- the link

    async def _call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """After what was asked before."""
        while (sending := self._tasks.get("send")) is not None:
            await asyncio.wait([sending])
        return await self._group.call(method, *args, **kwargs)

    def _start(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """One task of a name at a time, for as long as there is something for it to do."""
        if name not in self._tasks:
            self._tasks[name] = asyncio.get_running_loop().create_task(self._guarded(name, task), name=f"remote engine: {name}")

    async def _guarded(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except TandemError as error:
            self._lose(error)
        finally:
            del self._tasks[name]
            self._tell()

    def _lose(self, error: TandemError) -> None:
        """All requests end with this."""
        self._asked, self._left = [], []
        for chunks in self._live.values():
            chunks.put_nowait(error)
        self._live.clear()

    async def _send(self) -> None:
        """What gathers while a message is on its way goes with the next one."""
        while self._asked or self._left:
            asked, left = self._asked, self._left
            self._asked, self._left = [], []
            await self._group.call(EngineWorker.submit, asked, left)

    async def _listen(self) -> None:
        """While there are requests."""
        while self._live:
            for number, what in await self._group.call(EngineWorker.said):
                self._num_heard += 1
                if (chunks := self._live.get(number)) is None:
                    continue
                chunks.put_nowait(what)
                if isinstance(what, TandemError) or what.stop is not None:
                    del self._live[number]
            self._tell()

    def _tell(self) -> None:
        """Whoever waits for what is heard looks again, once."""
        self._heard.set()
        self._heard = asyncio.Event()

    async def _until_heard(self, num_said: int) -> None:
        """What was said before has arrived, as far as anybody waits for it."""
        while self._num_heard < num_said and "listen" in self._tasks:
            await self._heard.wait()
