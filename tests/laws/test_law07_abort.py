"""Law 7 where samples are made: what ended a turn is what its sample says, and an aborted one keeps its tokens.

What becomes of each stop afterwards is in test_law07_status.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.errors import EngineError
from tandem.rollout.native import NativeEngine
from tandem.rollout.session import Session
from tandem.rollout.stepping import SteppingEngine, Stream
from tandem.text.fake import FakeRenderer
from tandem.types import Key, Message, Sample, SamplingParams, Stop
from tests.laws.breaking import Breaker
from tests.rollout.tiny import decoder, engine

RENDERER = FakeRenderer()
MODEL = decoder(vocabulary=RENDERER.vocab_size)
KEY = Key("train", 1)
End = Callable[[NativeEngine], Coroutine[Any, Any, None]]


def record(end: End, max_tokens: int = 60) -> Sample:
    """The sample of a turn that runs for a while until `end` is called; nothing has been delivered by then."""

    async def scene() -> Sample:
        rollout = engine(MODEL, chunk_tokens=64)
        llm = Session(rollout, RENDERER, KEY, SamplingParams(max_tokens=max_tokens), seed=0, max_context=128)
        task = asyncio.create_task(llm.chat([Message("user", "ask")]))
        for _ in range(12):
            await asyncio.sleep(0)
        await end(rollout)
        await asyncio.gather(task, return_exceptions=True)
        (sample,) = llm.samples()
        return sample

    return asyncio.run(asyncio.wait_for(scene(), 30))


async def nothing(rollout: NativeEngine) -> None:
    pass


def check_an_aborted_turn_says_so_and_keeps_its_tokens() -> None:
    whole = record(nothing)
    assert whole.stop == "length"
    assert whole.mask.sum() == 60
    ends: list[End] = [lambda rollout: rollout.abort([KEY]), lambda rollout: rollout.close()]
    for end in ends:
        sample = record(end)
        assert sample.stop == "abort"
        assert 0 < sample.mask.sum() < 60
        assert sample.tokens.tolist() == whole.tokens[: len(sample.tokens)].tolist()


def check_a_turn_that_fails_is_an_error() -> None:
    async def fail(rollout: NativeEngine) -> None:
        def step() -> None:
            raise EngineError("out of order")

        rollout._step = step  # type: ignore[method-assign]

    assert record(fail).stop == "error"


def test_an_aborted_turn_says_so_and_keeps_its_tokens() -> None:
    check_an_aborted_turn_says_so_and_keeps_its_tokens()


def test_a_turn_that_fails_is_an_error() -> None:
    check_a_turn_that_fails_is_an_error()


# ---------------------------------------------------------------------------------------------------- breakers


def _aborted_as_complete(self: SteppingEngine, stream: Stream, stop: Stop) -> None:
    _END(self, stream, "stop" if stop == "abort" else stop)


def _partial_tokens_are_lost(self: NativeEngine, stream: Stream) -> tuple[list[int], list[float]]:
    tokens, logprobs = _UNSENT(self, stream)
    return ([], []) if stream.left > len(tokens) else (tokens, logprobs)


def _samples_are_complete(self: Session) -> tuple[Sample, ...]:
    for branch in self._branches:
        branch.stop = "stop" if branch.stop == "error" else branch.stop
    return _SAMPLES(self)


_END, _UNSENT, _SAMPLES = SteppingEngine._end, NativeEngine._unsent, Session.samples

BREAKERS = [
    Breaker(
        7,
        "aborted-as-complete",
        "tandem.rollout.stepping:SteppingEngine._end",
        _aborted_as_complete,
        check_an_aborted_turn_says_so_and_keeps_its_tokens,
    ),
    Breaker(
        7,
        "partial-tokens-are-lost",
        "tandem.rollout.native:NativeEngine._unsent",
        _partial_tokens_are_lost,
        check_an_aborted_turn_says_so_and_keeps_its_tokens,
    ),
    Breaker(
        7,
        "failed-as-complete",
        "tandem.rollout.session:Session.samples",
        _samples_are_complete,
        check_a_turn_that_fails_is_an_error,
    ),
]
