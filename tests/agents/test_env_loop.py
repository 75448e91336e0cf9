import asyncio

import pytest

from tandem.agents.calculator import CalculatorEnv
from tandem.agents.env_loop import EnvLoop
from tandem.agents.fake import FakeEnv, ScriptedLLM
from tandem.ports import Reply, StepResult
from tandem.types import Episode, Key, Message, Task

TASK = Task("t", (Message("user", "77*99="),), "7623")
KEY = Key("train", 0)


def run(env: FakeEnv, llm: ScriptedLLM, max_turns: int = 3) -> Episode:
    return asyncio.run(EnvLoop(lambda _: env, max_turns)(TASK, llm, KEY))


def told(text: str, reward: float = 0.0) -> StepResult:
    return StepResult((Message("tool", text),), reward)


def test_two_turns_through_the_calculator() -> None:
    llm = ScriptedLLM(["<77*99>", "7623"])
    episode = asyncio.run(EnvLoop(CalculatorEnv, 4)(TASK, llm, KEY))
    assert [(m.role, m.content) for m in episode.messages] == [
        ("user", "77*99="),
        ("assistant", "<77*99>"),
        ("tool", "7623;"),
        ("assistant", "7623"),
    ]
    assert episode.stop == "stop"
    assert episode.env_rewards == (0.0, 0.0)
    assert llm.asked[1] == episode.messages[:3]


def test_the_conversation_begins_with_what_the_environment_says() -> None:
    llm = ScriptedLLM(["a"])
    run(FakeEnv([StepResult((), done=True)], opening=[Message("system", "rules")]), llm)
    assert llm.asked == [(*TASK.messages, Message("system", "rules"))]


def test_every_reward_is_collected_and_messages_are_complete() -> None:
    env = FakeEnv([told("x", 0.25), StepResult((Message("tool", "y"),), 1.0, done=True)])
    episode = run(env, ScriptedLLM(["a", "b"]))
    assert episode.env_rewards == (0.25, 1.0)
    assert [m.content for m in episode.messages] == ["77*99=", "a", "x", "b", "y"]
    assert [m.content for m in env.actions] == ["a", "b"]
    assert (episode.stop, env.closed) == ("stop", 1)


def test_turns_that_run_out_and_truncation_are_a_tool_limit() -> None:
    env = FakeEnv([told("x", 1), told("y", 2), told("z", 3)])
    episode = run(env, ScriptedLLM(["a", "b", "c"]), max_turns=2)
    assert (episode.stop, episode.env_rewards, env.closed) == ("tool_limit", (1, 2), 1)
    assert run(FakeEnv([StepResult((), truncated=True)]), ScriptedLLM(["a"])).stop == "tool_limit"
    assert run(FakeEnv([StepResult((), done=True)]), ScriptedLLM(["a"]), max_turns=1).stop == "stop"


def test_a_turn_that_did_not_end_is_not_acted_on() -> None:
    env = FakeEnv([told("x")])
    episode = run(env, ScriptedLLM(["a", Reply(Message("assistant", "<7"), "length")]))
    assert [m.content for m in env.actions] == ["a"]
    assert (episode.stop, env.closed, episode.completion) == ("length", 1, "<7")


def test_the_environment_is_closed_when_it_or_the_engine_fails() -> None:
    for env, llm in ((FakeEnv([OSError("broken")]), ScriptedLLM(["a"])), (FakeEnv([]), ScriptedLLM([OSError("broken")]))):
        with pytest.raises(OSError, match="broken"):
            run(env, llm)
        assert env.closed == 1


def test_the_environment_is_closed_when_the_episode_is_cancelled() -> None:
    class Stuck(FakeEnv):
        async def step(self, action: Message) -> StepResult:
            await asyncio.sleep(60)
            return StepResult(())

    env = Stuck([])

    async def cancel() -> None:
        episode = asyncio.ensure_future(EnvLoop(lambda _: env, 3)(TASK, ScriptedLLM(["a"]), KEY))
        await asyncio.sleep(0.01)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(cancel())
    assert env.closed == 1


def test_an_episode_needs_a_turn() -> None:
    with pytest.raises(ValueError, match="max_turns is 0"):
        EnvLoop(CalculatorEnv, 0)
