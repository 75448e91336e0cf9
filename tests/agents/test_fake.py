import asyncio

from tandem.agents.fake import FakeAgent, ScriptedLLM
from tandem.types import Key, Message, Task


def test_the_fake_model_records_a_valid_sample_turn_by_turn() -> None:
    llm = ScriptedLLM(["ab", "c"], Key("x", 1))

    async def talk() -> None:
        await llm.chat((Message("user", "?"),))
        assert await llm.complete((1, 2)) == ((ord("c"), 0), "stop")

    asyncio.run(talk())
    (sample,) = llm.samples()
    assert sample.tokens.tolist() == [1, ord("a"), ord("b"), 0, 1, ord("c"), 0]
    assert sample.mask.tolist() == [False, True, True, True, False, True, True]
    assert sample.key == Key("x", 1)


def test_the_fake_agent_keeps_count() -> None:
    agent = FakeAgent()
    asyncio.run(agent(Task("t", (Message("user", "?"),)), ScriptedLLM(["a"]), Key("x", 1)))
    assert agent.seen == [Key("x", 1)]
