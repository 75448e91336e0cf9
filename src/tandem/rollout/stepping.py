"""The life of requests in an engine that lives in this process: everything of the port that knows no model.

    generate -> waiting -> running, in the adapter's own structures -> last chunk
                   |          |
                   '----------'--> abort, deadline, close, cancelled consumer, failed step

One asyncio task calls `_step` while there is work and lets others run between steps; there are no threads, so a step
is never interrupted, and `pause` or `abort` need not wait for one. An adapter says how to seat and step its requests.
A consumer that stops iterating, or whose task is cancelled, frees its place. A step that raises ends every request
with an EngineError that carries the cause, and leaves the engine empty and ready.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec

import numpy as np

from tandem.errors import EngineError
from tandem.faults import crash_point
from tandem.ports import Held, Place, WeightSource
from tandem.rollout.requests import check_request
from tandem.types import Chunk, GenerateRequest, Key, Metric, Metrics, PolicyRef, Stop
from tandem.weights import WeightBlock

P = ParamSpec("P")


@dataclass(slots=True, eq=False)
class Stream:
    """One request that has not ended. tokens: the request's and those delivered so far."""

    request: GenerateRequest
    tokens: list[int]
    prompt: bytes
    chunks: asyncio.Queue[Chunk | EngineError] = field(default_factory=asyncio.Queue[Chunk | EngineError])
    deadline: asyncio.TimerHandle | None = None

    @property
    def left(self) -> int:
        """Tokens that may still be delivered."""
        return self.request.params.max_tokens - self.request.sampled - (len(self.tokens) - len(self.request.tokens))


class SteppingEngine(ABC):
    """See the module's docstring.

    text: tokens to text, for stop strings, which are matched on the text of all tokens sampled for the request, earlier
    parts of a continued one included. vocab_size and max_context bound what a request may ask. policy: held at first.
    """

    def __init__(self, text: Callable[[Sequence[int]], str], *, vocab_size: int, max_context: int, policy: PolicyRef) -> None:
        self.vocab_size, self.max_context = vocab_size, max_context
        self._text, self._policy = text, policy
        self._live: dict[Stream, None] = {}  # in order of submission
        self._waiting: OrderedDict[Stream, None] = OrderedDict()
        self._paused = self._closed = self._loading = False
        self._where: Place = "device"
        self._task: asyncio.Task[None] | None = None
        self._counts: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------- what an adapter adds

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[str]: ...

    @abstractmethod
    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None: ...

    @abstractmethod
    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held: ...

    @abstractmethod
    def _step(self) -> None:
        """Seats waiting requests, samples one token for each running one, and delivers what is due."""

    @abstractmethod
    def _unsent(self, stream: Stream) -> tuple[list[int], list[float]]:
        """Takes the sampled tokens of a running request that are not delivered yet; empty for one that is not running."""

    @abstractmethod
    def _vacate(self, stream: Stream) -> None:
        """The request has ended: frees its place, if it runs."""

    @abstractmethod
    def _reset(self) -> None:
        """A step failed and all places are vacated: lets go of whatever it may have left half written."""

    # -------------------------------------------------------------------------------------------------- the port

    @property
    def policy(self) -> PolicyRef:
        return self._policy

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks in order, the last with `stop`; submitted when it is first iterated. Raises EngineError at once."""
        if self._closed:
            raise EngineError(f"request {request.key}: the engine is closed")
        check_request(request, vocab_size=self.vocab_size, max_context=self.max_context, policy=self._policy)
        return self._chunks(request)

    async def pause(self) -> None:
        self._paused = True
        self._deliver_all()

    async def resume(self) -> None:
        self._paused = False
        self._wake()

    async def abort(self, keys: Collection[Key]) -> None:
        wanted = frozenset(keys)
        for stream in [stream for stream in self._live if stream.request.key in wanted]:
            self._end(stream, "abort")

    async def place(self, where: Place) -> Mapping[str, int]:
        """See ports.RolloutEngine; of an engine that runs on the CPU."""
        self._deliver_all()
        self._where = where
        self._wake()
        return {}

    async def close(self) -> None:
        """Ends all requests as "abort"; the engine serves no more."""
        self._closed = True
        for stream in list(self._live):
            self._end(stream, "abort")

    def metrics(self) -> Metrics:
        """Since the last call: sampled_tokens, prefill_tokens, steps, requests that were aborted or cancelled; mean live rows."""
        counts, self._counts = self._counts, Counter()
        names = ("sampled_tokens", "prefill_tokens", "steps", "aborted", "cancelled")
        live = Metric(counts["sampled_tokens"], counts["steps"], "mean")
        return Metrics.sum({name: counts[name] for name in names}) + Metrics({"live_rows": live})

    # ------------------------------------------------------------------------------------------------- delivery

    def _verdict(self, stream: Stream, unsent: Sequence[int]) -> Stop | None:
        """Whether the request ends with the last of its `unsent` tokens."""
        request = stream.request
        if unsent[-1] in request.params.stop_ids:
            return "stop"
        if request.params.stop:
            text = self._text([*stream.tokens[len(request.tokens) - request.sampled :], *unsent])
            if any(stop in text for stop in request.params.stop):
                return "stop"
        return "length" if stream.left == len(unsent) else None

    def _deliver(self, stream: Stream, stop: Stop | None = None) -> None:
        """A chunk with the unsent tokens, if there is anything to say."""
        tokens, logprobs = self._unsent(stream)
        stream.tokens += tokens
        if tokens or stop is not None:
            stream.chunks.put_nowait(Chunk(tuple(tokens), tuple(logprobs), self._policy, stop))

    def _deliver_all(self) -> None:
        for stream in self._live:
            self._deliver(stream)

    def _end(self, stream: Stream, stop: Stop) -> None:
        self._deliver(stream, stop)
        self._forget(stream)
        if stop == "abort":
            self._counts["aborted"] += 1

    def _forget(self, stream: Stream) -> None:
        del self._live[stream]
        self._waiting.pop(stream, None)
        self._vacate(stream)
        if stream.deadline is not None:
            stream.deadline.cancel()

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if self._closed:
            raise EngineError(f"request {request.key}: the engine is closed")
        stream = Stream(request, list(request.tokens), np.array(request.tokens, np.int64).tobytes())
        self._live[stream] = None
        if request.deadline_s is not None:
            stream.deadline = asyncio.get_running_loop().call_later(request.deadline_s, self._end, stream, "abort")
        if stream.left > 0:
            self._waiting[stream] = None
            self._wake()
        else:
            self._end(stream, "length")
        try:
            while True:
                item = await stream.chunks.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.stop is not None:
                    return
        finally:
            if stream in self._live:
                self._counts["cancelled"] += 1
                self._forget(stream)

    # ------------------------------------------------------------------------------------------------- stepping

    def _ready(self) -> bool:
        return bool(self._live) and not self._paused and not self._loading and self._where == "device"

    def _wake(self) -> None:
        if self._task is None and self._ready():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="rollout engine")
            self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        while self._ready():
            crash_point("rollout.step")
            self._step()
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        cause = asyncio.CancelledError("its event loop was stopped") if task.cancelled() else task.exception()
        if cause is None:
            self._wake()  # a request may have come after the last look
            return
        for stream in list(self._live):
            failure = EngineError(f"request {stream.request.key}: generation failed with {type(cause).__name__}: {cause}")
            failure.__cause__ = cause
            self._forget(stream)
            stream.chunks.put_nowait(failure)
        self._reset()

    async def _halted(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls it in a thread, and takes no step until it has returned, which also one who gives up waiting waits for."""
        self._loading = True
        call = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
        try:
            await asyncio.shield(call)
        finally:
            await asyncio.wait([call])
            self._loading = False
            self._wake()
