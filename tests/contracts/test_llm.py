"""The laws of ports.LLM, for the session over either engine and for the fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tandem.models.decoder import init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.ports import LLM
from tandem.rollout.fake import FakeEngine, FakeLLM
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.session import Session
from tandem.text.fake import FakeRenderer
from tandem.types import Key, Message, SamplingParams

KEY = Key("train", 1, 2)
RENDERER = FakeRenderer()
ASK, MORE = Message("user", "ask"), Message("user", "more")
SHAPE = DecoderConfig(
    vocab_size=RENDERER.vocab_size, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
)
WORDS = ("hello", "world", "again")


def over_native() -> LLM:
    model = init_decoder(SHAPE, 0)
    with torch.no_grad():
        model.model.norm.weight.mul_(10)
    engine = NativeEngine(model, RENDERER.text, NativeConfig(slots=2, max_context=400), exact=True)
    return Session(engine, RENDERER, KEY, SamplingParams(max_tokens=100), seed=0, max_context=400)


def over_fake() -> LLM:
    words = iter(WORDS)
    engine = FakeEngine(lambda _: (*(5 + ord(character) for character in next(words)), RENDERER.END))
    return Session(engine, RENDERER, KEY, SamplingParams(max_tokens=100), seed=0, max_context=400)


def fake() -> LLM:
    return FakeLLM(WORDS, KEY)


@pytest.fixture(params=[over_native, over_fake, fake], ids=["session-native", "session-fake", "fake"])
def llm(request: pytest.FixtureRequest) -> LLM:
    make: Callable[[], LLM] = request.param
    return make()


def test_nothing_is_recorded_before_anything_is_said(llm: LLM) -> None:
    assert llm.samples() == ()


def test_a_conversation_is_one_sample(llm: LLM) -> None:
    """What was rendered and what was sampled, in order; the mask is true exactly on the turns."""

    async def scene() -> None:
        messages = [ASK]
        turns: list[str] = []
        for num in (1, 2):
            reply = await llm.chat(messages, params=SamplingParams(max_tokens=20 * num))
            assert reply.message.role == "assistant"
            assert reply.stop in ("stop", "length")
            turns.append(reply.message.content)
            messages += [reply.message, MORE]
        (sample,) = llm.samples()
        assert sample.key == KEY
        assert sample.stop == reply.stop
        assert RENDERER.text(sample.tokens[sample.mask].tolist()) == "".join(turns)
        opening = RENDERER.opening([ASK])
        assert sample.tokens[: len(opening)].tolist() == list(opening)
        assert not sample.mask[: len(opening)].any()
        assert (sample.logprobs[sample.mask] < 0).any()
        assert not np.any(sample.logprobs[~sample.mask])
        assert sum(count for _, count in sample.policy) == sample.mask.sum() <= 40

    asyncio.run(scene())


def test_a_changed_conversation_is_a_branch(llm: LLM) -> None:
    async def scene() -> None:
        first = await llm.chat([ASK])
        before = llm.samples()[0]
        await llm.chat([Message("user", "other"), first.message, MORE])
        samples = llm.samples()
        assert [sample.key for sample in samples] == [KEY, KEY._replace(branch=1)]
        assert np.array_equal(samples[0].tokens, before.tokens)

    asyncio.run(scene())


def test_complete_is_a_sample_of_its_own(llm: LLM) -> None:
    async def scene() -> None:
        await llm.chat([ASK])
        tokens, stop = await llm.complete([7, 8, 9], SamplingParams(max_tokens=6))
        sample = llm.samples()[1]
        assert sample.key == KEY._replace(branch=1)
        assert sample.tokens.tolist() == [7, 8, 9, *tokens]
        assert sample.mask.tolist() == [False] * 3 + [True] * len(tokens)
        assert (sample.stop, len(tokens)) == (stop, 6)

    asyncio.run(scene())


def test_the_budget_is_the_samples(llm: LLM) -> None:
    async def scene() -> None:
        params = SamplingParams(max_tokens=7)
        first = await llm.chat([ASK], params=params)
        messages = [ASK, first.message, MORE]
        second = await llm.chat(messages, params=params)
        assert second.stop == "length"
        third = await llm.chat([*messages, second.message, MORE], params=params)
        assert (third.message.content, third.stop) == ("", "length")
        (sample,) = llm.samples()
        assert (sample.mask.sum(), sample.stop) == (7, "length")

    asyncio.run(scene())


def test_samples_are_snapshots(llm: LLM) -> None:
    async def scene() -> None:
        first = await llm.chat([ASK])
        (early,) = llm.samples()
        length = len(early.tokens)
        await llm.chat([ASK, first.message, MORE])
        assert len(early.tokens) == length
        with pytest.raises(ValueError, match="read-only"):
            early.tokens[0] = 1

    asyncio.run(scene())
