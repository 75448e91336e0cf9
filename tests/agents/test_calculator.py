import asyncio

import pytest

from tandem.agents.calculator import CalculatorEnv
from tandem.ports import StepResult
from tandem.types import Message, Task


def step(text: str) -> StepResult:
    return asyncio.run(CalculatorEnv(Task("t", (Message("user", "1+1="),))).step(Message("assistant", text)))


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("<77*99>", "7623;"),
        ("<2+3>", "5;"),
        ("<2-30>", "-28;"),
        ("<-2*-3>", "6;"),
        (" <07+1>\n", "8;"),
        ("<999999999*1>", "999999999;"),
    ],
)
def test_a_call_is_worked_out(call: str, result: str) -> None:
    assert step(call) == StepResult((Message("tool", result),))


@pytest.mark.parametrize(
    "text",
    ["7623", "?", "", "<7*9", "7*9>", "<7/9>", "<7*9><7*9>", "a<7*9>", "<7**9>", "<__import__('os')>", "<1234567890+1>"],
)
def test_anything_else_ends_the_episode_without_a_reward(text: str) -> None:
    assert step(text) == StepResult((), 0.0, done=True)
