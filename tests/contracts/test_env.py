"""What every Env promises, walked through one episode that it accepts."""

import asyncio
from collections.abc import Callable

import pytest

from tandem.agents.calculator import CalculatorEnv
from tandem.agents.fake import FakeEnv
from tandem.ports import Env, StepResult
from tandem.types import Message, Task

TASK = Task("t", (Message("user", "7*9="),), "63")
ENVS: dict[str, Callable[[], Env]] = {
    "fake": lambda: FakeEnv([StepResult((Message("tool", "63;"),), 0.5), StepResult((), 1.0, done=True)], [Message("tool", "hi")]),
    "calculator": lambda: CalculatorEnv(TASK),
}


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_an_episode_goes_from_start_to_done_and_close(make: Callable[[], Env]) -> None:
    async def walk() -> list[StepResult]:
        env = make()
        opening = await env.start()
        assert all(message.role != "assistant" for message in opening)
        results = [await env.step(Message("assistant", text)) for text in ("<7*9>", "63")]
        await env.close()
        return results

    first, last = asyncio.run(walk())
    assert first.messages
    assert all(message.role != "assistant" for message in first.messages)
    assert not first.done
    assert last.done


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_it_can_be_closed_unused(make: Callable[[], Env]) -> None:
    asyncio.run(make().close())
