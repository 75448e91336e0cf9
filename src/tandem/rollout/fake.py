"""Fakes for the tests of other rooms: an engine and an LLM that say what a script tells them, without a model.

`FakeEngine` has the exact semantics of the port, since it shares the life of requests with the native engine.
`FakeLLM` speaks text and records samples whose tokens are code points.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tandem.ports import Reply, WeightSource
from tandem.rollout.stepping import SteppingEngine, Stream
from tandem.types import Json, Key, Message, PolicyRef, Sample, SamplingParams, Stop

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

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"batch_invariant"})

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        self._deliver_all()
        self._policy = policy

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


class FakeLLM:
    """Says `turns` one after the other, whatever it is asked; after the last it says "" and stops for "length".

    Implements ports.LLM. One sample holds the whole conversation: of each call the messages that are new, and the turn.
    """

    def __init__(self, turns: Sequence[str], key: Key, policy: PolicyRef | None = None) -> None:
        self.asked: list[tuple[Message, ...]] = []  # the messages of each call
        self._turns = deque(turns)
        self._key, self._policy = key, policy or PolicyRef()
        self._text: list[tuple[str, bool]] = []
        self._heard = 0
        self._stop: Stop = "abort"

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Json]] = (), params: SamplingParams | None = None
    ) -> Reply:
        self.asked.append(tuple(messages))
        self._text += [(message.content, False) for message in messages[self._heard :]]
        self._heard = len(messages) + 1
        return Reply(Message("assistant", self._say()), self._stop)

    async def complete(self, tokens: Sequence[int], params: SamplingParams | None = None) -> tuple[tuple[int, ...], Stop]:
        self._text.append((_characters(tokens), False))
        return tuple(map(ord, self._say())), self._stop

    def samples(self) -> tuple[Sample, ...]:
        tokens = [ord(character) for text, _ in self._text for character in text]
        if not tokens:
            return ()
        mask = [sampled for text, sampled in self._text for _ in text]
        runs = ((self._policy, sum(mask)),) if any(mask) else ()
        return (Sample(self._key, np.array(tokens), np.array(mask), -np.array(mask, np.float32), runs, self._stop),)

    def _say(self) -> str:
        self._stop = "stop" if self._turns else "length"
        turn = self._turns.popleft() if self._turns else ""
        self._text.append((turn, True))
        return turn
