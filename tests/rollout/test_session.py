"""The session records what was rendered and what was sampled, byte for byte, and who wrote which token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tandem.errors import DataError, EngineError
from tandem.models.heads import row_logprobs
from tandem.rollout.fake import FakeEngine
from tandem.rollout.session import Session
from tandem.text.fake import FakeRenderer
from tandem.types import Chunk, GenerateRequest, Key, Message, PolicyRef, Sample, SamplingParams
from tandem.weights import Room, WeightBlock, WeightShard, nowhere
from tests.rollout import tiny

RENDERER = FakeRenderer()
END = RENDERER.END
KEY = Key("train", 4, 2)
ASK, MORE = Message("user", "ask"), Message("user", "more")


def spoken(text: str, *, end: bool = True) -> tuple[int, ...]:
    """The tokens of a turn, with the token that ends it or without."""
    tokens = RENDERER.demonstration([Message("assistant", text)])[0][1:]
    return tokens if end else tokens[:-1]


class Engine(FakeEngine):
    """Says the turns in order and keeps the requests."""

    def __init__(self, *turns: Sequence[int], **named: Any) -> None:
        left = iter(turns)
        super().__init__(lambda _: next(left), text=RENDERER.text, **named)
        self.requests: list[GenerateRequest] = []

    def generate(self, request: GenerateRequest) -> Any:
        self.requests.append(request)
        return super().generate(request)


def session(engine: FakeEngine, renderer: FakeRenderer = RENDERER, *, max_context: int = 1000, **params: Any) -> Session:
    return Session(engine, renderer, KEY, SamplingParams(**params), seed=11, max_context=max_context)


def play(scene: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 30))


def assert_parts(sample: Sample, *parts: tuple[Sequence[int], bool]) -> None:
    """The sample is these stretches of tokens, each sampled or not."""
    assert sample.tokens.tolist() == [token for tokens, _ in parts for token in tokens]
    assert sample.mask.tolist() == [sampled for tokens, sampled in parts for _ in tokens]
    assert np.array_equal(sample.logprobs, -sample.mask.astype(np.float32))


# -------------------------------------------------------------------------------------------------- provenance


def test_two_turns_are_one_sample() -> None:
    """An end token that the policy sampled is in the sample once, and counts as sampled."""

    async def scene() -> None:
        engine = Engine(spoken("hi"), spoken("bye"))
        llm = session(engine)
        first = await llm.chat([ASK])
        assert (first.message, first.stop) == (Message("assistant", "hi"), "stop")
        second = await llm.chat([ASK, first.message, MORE])
        assert second.message.content == "bye"
        (sample,) = llm.samples()
        opening, between = RENDERER.opening([ASK]), RENDERER.opening([MORE])
        assert_parts(sample, (opening, False), (spoken("hi"), True), (between, False), (spoken("bye"), True))
        assert (sample.key, sample.stop, sample.temperature, sample.full_support) == (KEY, "stop", 1.0, True)
        assert sample.policy == ((PolicyRef(), 7),)
        turns = [0] * len((*opening, *spoken("hi"))) + [1] * len((*between, *spoken("bye")))
        assert sample.columns["turns"].tolist() == turns
        assert [(r.key, r.seed, r.turn, r.sampled) for r in engine.requests] == [(KEY, 11, 0, 0), (KEY, 11, 1, 0)]
        assert engine.requests[1].tokens == (*opening, *spoken("hi"), *between)

    play(scene)


def test_an_end_token_that_the_renderer_wrote_is_not_sampled() -> None:
    """After a turn that a stop string or the length ended, the renderer closes it."""

    async def scene() -> None:
        llm = session(Engine(spoken("ab!cd"), spoken("bye")), stop=("b!",))
        first = await llm.chat([ASK])
        assert (first.message.content, first.stop) == ("ab!", "stop")
        await llm.chat([ASK, first.message, MORE])
        (sample,) = llm.samples()
        assert_parts(
            sample,
            (RENDERER.opening([ASK]), False),
            (spoken("ab!", end=False), True),
            ((END, *RENDERER.opening([MORE])), False),
            (spoken("bye"), True),
        )

    play(scene)


def test_the_same_token_in_a_prompt_is_not_sampled() -> None:
    """Masks come from who wrote a token, not from its value: the prompt holds end tokens too."""

    async def scene() -> None:
        llm = session(Engine((END,)))
        reply = await llm.chat([ASK, Message("assistant", "x"), MORE])
        assert (reply.message.content, reply.stop) == ("", "stop")
        (sample,) = llm.samples()
        assert (sample.tokens == END).sum() == 4
        assert sample.mask.tolist() == [False] * (len(sample.tokens) - 1) + [True]

    play(scene)


# ---------------------------------------------------------------------------------------------------- branches


def test_history_that_was_changed_branches() -> None:
    async def scene() -> None:
        engine = Engine(spoken("one"), spoken("two"), spoken("three"))
        llm = session(engine)
        await llm.chat([ASK])
        await llm.chat([ASK, Message("assistant", "ONE"), MORE])
        await llm.chat([ASK])  # the turn taken back
        samples = llm.samples()
        assert [sample.key.branch for sample in samples] == [0, 1, 2]
        assert [request.key.branch for request in engine.requests] == [0, 1, 2]
        assert_parts(samples[1], (RENDERER.opening([ASK, Message("assistant", "ONE"), MORE]), False), (spoken("two"), True))

    play(scene)


def test_a_template_that_rewrites_history_branches() -> None:
    async def scene() -> None:
        renderer = FakeRenderer(extends=False)
        llm = session(Engine(spoken("one"), spoken("two")), renderer)
        first = await llm.chat([ASK])
        await llm.chat([ASK, first.message, MORE])
        assert_parts(llm.samples()[1], (renderer.opening([ASK, first.message, MORE]), False), (spoken("two"), True))

    play(scene)


@pytest.mark.parametrize(
    "changed",
    [{"tools": ({"name": "calculator"},)}, {"params": SamplingParams(temperature=0.5)}, {"params": SamplingParams(top_k=3)}],
)
def test_other_tools_or_sampling_branch(changed: dict[str, Any]) -> None:
    async def scene() -> None:
        llm = session(Engine(spoken("one"), spoken("two"), spoken("three")))
        first = await llm.chat([ASK])
        second = await llm.chat([ASK, first.message, MORE], **changed)
        await llm.chat([ASK, first.message, MORE, second.message, MORE], **changed)
        samples = llm.samples()
        assert [sample.key.branch for sample in samples] == [0, 1]
        if params := changed.get("params"):
            assert (samples[1].temperature, samples[1].full_support) == (params.temperature, params.full_support)

    play(scene)


def test_complete_is_a_sample_of_its_own() -> None:
    async def scene() -> None:
        engine = Engine(spoken("one"), (9, 8, END, 7), spoken("two"))
        llm = session(engine)
        first = await llm.chat([ASK])
        assert await llm.complete([5, END], SamplingParams(temperature=0.5, stop_ids=(7,))) == ((9, 8, END, 7), "stop")
        await llm.chat([ASK, first.message, MORE])
        chat, raw = llm.samples()
        assert chat.mask.sum() == 8
        assert_parts(raw, ((5, END), False), ((9, 8, END, 7), True))
        assert (raw.key.branch, raw.temperature) == (1, 0.5)

    play(scene)


def test_greedy_samples_say_that_they_are() -> None:
    async def scene() -> None:
        llm = session(Engine(spoken("one")), temperature=0.0)
        await llm.chat([ASK])
        (sample,) = llm.samples()
        assert (sample.temperature, sample.full_support) == (0.0, False)

    play(scene)


# ------------------------------------------------------------------------------------------------------ budget


def test_the_token_budget_is_the_samples() -> None:
    """Observations are free; when it is spent the turn is empty, and stays so however the agent goes on."""

    async def scene() -> None:
        engine = Engine(spoken("four"), spoken("longer than that"), spoken("never"))
        llm = session(engine, max_tokens=8)
        first = await llm.chat([ASK])
        second = await llm.chat([ASK, first.message, MORE])
        assert (second.message.content, second.stop) == ("lon", "length")
        assert [request.params.max_tokens for request in engine.requests] == [8, 3]
        history = [ASK, first.message, MORE, second.message, MORE]
        third = await llm.chat(history)
        fourth = await llm.chat([*history, third.message, MORE])
        assert third == fourth
        assert (third.message.content, third.stop) == ("", "length")
        (sample,) = llm.samples()
        assert sample.mask.sum() == 8
        assert sample.mask[-1]
        assert sample.stop == "length"
        assert len(engine.requests) == 2

    play(scene)


def test_a_branch_has_a_budget_of_its_own() -> None:
    async def scene() -> None:
        llm = session(Engine(spoken("four"), spoken("four")), max_tokens=5)
        await llm.chat([ASK])
        assert (await llm.chat([MORE])).stop == "stop"

    play(scene)


def test_the_context_bounds_a_sample() -> None:
    async def scene() -> None:
        engine = Engine(spoken("four"), spoken("never"), max_context=14)
        llm = session(engine, max_context=14)
        first = await llm.chat([ASK])  # 6 tokens, then 5
        second = await llm.chat([ASK, first.message, MORE])  # 7 more do not fit
        assert (second.message.content, second.stop) == ("", "length")
        (sample,) = llm.samples()
        assert (len(sample.tokens), sample.stop) == (11, "length")
        assert engine.requests[0].params.max_tokens == 8

    play(scene)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    async def scene() -> None:
        llm = session(Engine(spoken("never")), max_context=6)
        with pytest.raises(DataError, match=r"the prompt of train:4\.2\.0 has 6 tokens and the context 6"):
            await llm.chat([ASK])
        with pytest.raises(DataError, match="has 7 tokens"):
            await llm.complete([1] * 7)
        assert llm.samples() == ()

    play(scene)


# ------------------------------------------------------------------------------------ how a turn ends otherwise


class Shared:
    shared = True
    blocks: tuple[WeightBlock, ...] = ()

    def shards(self, room: Room = nowhere) -> Iterator[WeightShard]:
        return iter(())


def test_the_policies_of_a_turn() -> None:
    """New weights in the middle: each token has the policy that sampled it, run-length coded."""

    async def scene() -> None:
        engine = Engine(spoken("x" * 20), spoken("y"))
        llm = session(engine)
        task = asyncio.create_task(llm.chat([ASK]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.load_weights(Shared(), PolicyRef(version=1))
        first = await task
        await llm.chat([ASK, first.message, MORE])
        (sample,) = llm.samples()
        (old, before), (new, after) = sample.policy
        assert (old.version, new.version) == (0, 1)
        assert before > 0
        assert before + after == 21 + 2
        assert sample.oldest_policy == old

    play(scene)


def test_an_aborted_turn_is_never_complete() -> None:
    """Law 7: the stop of the sample is "abort", with the tokens that were there."""

    async def scene() -> None:
        engine = Engine(spoken("x" * 50), spoken("never"))
        llm = session(engine)
        task = asyncio.create_task(llm.chat([ASK]))
        for _ in range(10):
            await asyncio.sleep(0)
        await engine.abort([KEY])
        reply = await task
        assert reply.stop == "abort"
        assert 0 < len(reply.message.content) < 50
        (sample,) = llm.samples()
        assert sample.stop == "abort"
        assert sample.tokens[-1] != END
        assert sample.mask.sum() == len(reply.message.content)

    play(scene)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_turn_that_does_not_end_is_an_error_and_cannot_go_on(how: str) -> None:
    class Broken(Engine):
        async def _break(self, stream: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
            async for chunk in stream:
                yield chunk
                if how == "failed":
                    raise EngineError("out of order")
                await asyncio.sleep(60)

        def generate(self, request: GenerateRequest) -> Any:
            stream = super().generate(request)
            return self._break(stream) if len(self.requests) == 1 else stream

    async def scene() -> None:
        llm = session(Broken(spoken("one"), spoken("two")))
        task = asyncio.create_task(llm.chat([ASK]))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert isinstance(task.exception(), EngineError) if how == "failed" else task.cancelled()
        (sample,) = llm.samples()
        assert (sample.stop, sample.mask.sum()) == ("error", 1)
        await llm.chat([ASK])
        assert [sample.key.branch for sample in llm.samples()] == [0, 1]

    play(scene)


def test_an_engine_that_forgets_to_stop() -> None:
    class Silent(Engine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            yield Chunk((9,), (-1.0,), PolicyRef())

    async def scene() -> None:
        with pytest.raises(EngineError, match="last chunk has no stop"):
            await session(Silent()).chat([ASK])

    play(scene)


# --------------------------------------------------------------------------------------------- with a model


def test_recorded_logprobs_are_the_trainers() -> None:
    """Two turns through the native engine: each sampled token's logprob, given all tokens before it, bit for bit."""
    model = tiny.decoder(vocabulary=RENDERER.vocab_size)

    async def scene() -> None:
        llm = Session(tiny.engine(model), RENDERER, KEY, SamplingParams(max_tokens=12, temperature=0.8), seed=1, max_context=128)
        messages = [ASK]
        for stop in ("a", "b"):
            params = SamplingParams(max_tokens=40, temperature=0.8, stop=(stop,))
            reply = await llm.chat(messages, params=params)
            messages += [reply.message, MORE]
        for sample in llm.samples():
            tokens, mask = torch.from_numpy(sample.tokens.copy())[None], torch.from_numpy(sample.mask.copy())[None]
            temperature = torch.tensor([sample.temperature])
            want, _ = row_logprobs(model, tokens, torch.tensor([len(sample.tokens)]), mask, temperature)
            assert mask.sum() > 5
            assert np.array_equal(want[0].detach().numpy(), sample.logprobs)

    play(scene)
