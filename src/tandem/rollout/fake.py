"""Fakes for the tests of other rooms: an engine and an LLM that say what a script tells them, without a model.

`FakeEngine` has the exact semantics of the port, since it shares the life of requests with the native engine, and
`FakeLLM` those of the session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.ports import Held, Reply, WeightSource
from tandem.rollout.session import Session, Tools
from tandem.rollout.stepping import SteppingEngine, Stream
from tandem.rollout.weights import scatter, wire_hash
from tandem.text.fake import FakeRenderer
from tandem.types import Key, Message, PolicyRef, SamplingParams
from tandem.weights import WeightBlock

Script = Callable[[tuple[int, ...]], Sequence[int]]


def _characters(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


class FakeEngine(SteppingEngine):
    """Continues every prompt as `script` says: one token a step, each a chunk of its own, with logprob -1.

    script: from the prompt (without tokens that were sampled before) to all tokens that follow it, or the tokens
    themselves. A request ends at a stop id or string ("stop"), at max_tokens ("length") or where its script ends
    ("stop"). text: for stop strings; tokens are code points by default.
    """

    def __init__(
        self,
        script: Script | Sequence[int],
        *,
        slots: int = 64,
        vocab_size: int = 0x110000,
        max_context: int = 1 << 20,
        policy: PolicyRef | None = None,
        text: Callable[[Sequence[int]], str] = _characters,
    ) -> None:
        super().__init__(text, vocab_size=vocab_size, max_context=max_context, policy=policy or PolicyRef())
        self._script: Script = script if callable(script) else lambda _: script
        self._slots = slots
        self._running: dict[Stream, deque[int]] = {}  # what each has still to say
        self._fresh: dict[Stream, int] = {}
        self._weights: dict[str, Tensor] = {}

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"batch_invariant"})

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        self._deliver_all()
        if not source.shared:
            for piece in source.shards():
                name, shape, dtype = piece.block.name, piece.block.shape, piece.block.dtype
                scatter(piece, self._weights.setdefault(name, torch.zeros(shape, dtype=dtype)))
        self._policy = policy

    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held:
        """It keeps weights, and does not say what follows from them."""
        hashes = tuple(wire_hash(self._weights, part) for part in blocks)
        return Held(hashes, tuple(np.full(len(row) - 1, -1, np.float32) for row in rows), float("inf"))

    def _step(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            stream, _ = self._waiting.popitem(last=False)
            num = stream.request.sampled
            self._running[stream] = deque(self._script(stream.request.tokens[: len(stream.request.tokens) - num])[num:])
        self._counts["steps"] += 1
        for stream, rest in list(self._running.items()):
            if rest:
                token = self._fresh[stream] = rest.popleft()
                self._counts["sampled_tokens"] += 1
                stop = self._verdict(stream, [token])
            else:
                stop = "stop"
            if stop is None:
                self._deliver(stream)
            else:
                self._end(stream, stop)

    def _unsent(self, stream: Stream) -> tuple[list[int], list[float]]:
        token = self._fresh.pop(stream, None)
        return ([], []) if token is None else ([token], [-1.0])

    def _vacate(self, stream: Stream) -> None:
        self._running.pop(stream, None)

    def _reset(self) -> None:
        self._fresh.clear()


class FakeLLM(Session):
    """Implements ports.LLM: says `turns` one after the other, whatever it is asked, and then nothing.

    It is a session over the fake engine and the fake renderer, so its samples are recorded as real ones are.
    asked: the messages of each call of `chat`.
    """

    def __init__(self, turns: Sequence[str], key: Key, policy: PolicyRef | None = None) -> None:
        renderer, left = FakeRenderer(), deque(turns)

        def script(prompt: tuple[int, ...]) -> Sequence[int]:
            return renderer.demonstration([Message("assistant", left.popleft())])[0][1:] if left else ()

        super().__init__(
            FakeEngine(script, policy=policy), renderer, key, SamplingParams(max_tokens=1 << 16), seed=0, max_context=1 << 20
        )
        self.asked: list[tuple[Message, ...]] = []

    async def chat(self, messages: Sequence[Message], *, tools: Tools = (), params: SamplingParams | None = None) -> Reply:
        self.asked.append(tuple(messages))
        return await super().chat(messages, tools=tools, params=params)
