"""A calculator as an environment: `<77*99>` is answered by `7623;`, anything else ends the episode."""

from __future__ import annotations

import re

from tandem.ports import StepResult
from tandem.types import Message, Task

_CALL = re.compile(r"<(-?[0-9]{1,9})([+*-])(-?[0-9]{1,9})>")
_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class CalculatorEnv:
    """Implements the Env port. It gives no reward: a reward function judges the last turn.

    A turn that is one call and nothing else is worked out; a plain answer or a call that cannot be read is the last turn.
    """

    def __init__(self, task: Task) -> None:
        del task  # the question is in the conversation already

    async def start(self) -> tuple[Message, ...]:
        return ()

    async def step(self, action: Message) -> StepResult:
        call = _CALL.fullmatch(action.content.strip())
        if call is None:
            return StepResult((), done=True)
        left, symbol, right = call.groups()
        return StepResult((Message("tool", f"{_OPERATIONS[symbol](int(left), int(right))};"),))

    async def close(self) -> None:
        pass
