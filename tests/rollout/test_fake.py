"""The fakes say what their script says; that they keep to their ports is in contracts/."""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.rollout.fake import FakeEngine, FakeLLM
from tandem.types import Chunk, GenerateRequest, Key, Message, PolicyRef, SamplingParams

ASK = Message("user", "ask")


def chunks(engine: FakeEngine, tokens: tuple[int, ...], sampled: int = 0, **params: Any) -> list[Chunk]:
    async def scene() -> list[Chunk]:
        asked = GenerateRequest(Key("t", 0), tokens, SamplingParams(**params), seed=0, sampled=sampled)
        return [chunk async for chunk in engine.generate(asked)]

    return asyncio.run(scene())


def test_a_fixed_script_ends_where_it_ends() -> None:
    policy = PolicyRef(version=3)
    got = chunks(FakeEngine([7, 8], policy=policy), (1,))
    assert got == [Chunk((7,), (-1.0,), policy), Chunk((8,), (-1.0,), policy), Chunk((), (), policy, "stop")]


def test_a_script_sees_the_prompt_without_what_was_sampled() -> None:
    seen: list[tuple[int, ...]] = []

    def script(prompt: tuple[int, ...]) -> list[int]:
        seen.append(prompt)
        return [7, 8, 9]

    assert [chunk.tokens for chunk in chunks(FakeEngine(script), (1, 2, 7, 8), sampled=2)] == [(9,), ()]
    assert seen == [(1, 2)]


def test_the_text_of_tokens_is_code_points() -> None:
    got = chunks(FakeEngine(list(map(ord, "say stop now"))), (1,), stop=("op",))
    assert "".join(chr(token) for chunk in got for token in chunk.tokens) == "say stop"


def test_an_llm_says_its_turns_and_remembers_what_it_was_asked() -> None:
    async def scene() -> None:
        llm = FakeLLM(["one"], Key("t", 0))
        first = await llm.chat([ASK])
        second = await llm.chat([ASK, first.message, ASK])
        assert (first.message.content, second.message.content, second.stop) == ("one", "", "stop")
        assert llm.asked == [(ASK,), (ASK, first.message, ASK)]
        assert llm.samples()[0].mask.sum() == 4

    asyncio.run(scene())
