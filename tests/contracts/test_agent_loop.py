"""What every AgentLoop promises."""

import asyncio

import pytest

from tandem.agents.env_loop import EnvLoop
from tandem.agents.fake import FakeAgent, FakeEnv, ScriptedLLM
from tandem.agents.single_turn import SingleTurn
from tandem.ports import AgentLoop, Reply, StepResult
from tandem.types import Episode, Key, Message, Stop, Task

TASK = Task("t", (Message("system", "S"), Message("user", "2+2=")), "4")
KEY = Key("train", 3, 1)
LOOPS: dict[str, AgentLoop] = {
    "fake": FakeAgent(),
    "single_turn": SingleTurn(),
    "env_loop": EnvLoop(lambda _: FakeEnv([StepResult((), 0.5, done=True)]), max_turns=2),
}


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> AgentLoop:
    return LOOPS[request.param]


def episode(loop: AgentLoop, llm: ScriptedLLM) -> Episode:
    return asyncio.run(loop(TASK, llm, KEY))


def test_the_episode_is_of_its_task_and_key(loop: AgentLoop) -> None:
    made = episode(loop, ScriptedLLM(["4"], KEY))
    assert made.task == TASK
    assert made.key == KEY
    assert made.completion == "4"
    assert made.messages[: len(TASK.messages)] == TASK.messages


def test_samples_are_those_that_were_recorded(loop: AgentLoop) -> None:
    llm = ScriptedLLM(["4"], KEY)
    made = episode(loop, llm)
    (theirs,), (ours,) = llm.samples(), made.samples
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.mask.tolist() == theirs.mask.tolist()


@pytest.mark.parametrize("stop", ["length", "abort", "error"])
def test_a_turn_that_does_not_end_gives_its_stop_to_the_episode(loop: AgentLoop, stop: Stop) -> None:
    assert episode(loop, ScriptedLLM([Reply(Message("assistant", "4"), stop)], KEY)).stop == stop


def test_a_complete_turn_ends_with_stop(loop: AgentLoop) -> None:
    assert episode(loop, ScriptedLLM(["4"], KEY)).stop == "stop"


def test_errors_of_the_engine_pass_through(loop: AgentLoop) -> None:
    with pytest.raises(OSError, match="gone"):
        episode(loop, ScriptedLLM([OSError("gone")], KEY))
