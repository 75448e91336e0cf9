"""Built-in rewards that compare what an answer says at its end with the task's answer: a number, a choice, a pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from tandem.errors import RewardError
from tandem.rewards.functions import answer_of, judged
from tandem.types import Episode, Task

_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d[\d,]{0,100}(?:\.\d{1,100})?|\.\d{1,100})(?:[eE][-+]?\d{1,3}\b|/\d{1,100}(?![\d.]))?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def numeric(task: Task, group: Sequence[Episode], *, tolerance: float = 0.0) -> list[float]:
    r"""1 where the number of the last assistant turn is that of the task's answer, or differs by no more than `tolerance`.

    Of a text it is the last \boxed{} one, or else the last one: 1,234.50, -3/4, 2e-3. An answer like "... #### 72" has 72.
    """
    expected = _value(str(answer_of(task)))
    if expected is None:
        raise ValueError(f"the answer of task {task.id!r}, {task.answer!r}, has no number to compare with")
    slack = Fraction(tolerance)

    def right(text: str) -> bool:
        value = _value(text)
        return value is not None and abs(value - expected) <= slack

    return judged(group, right)


def choice(task: Task, group: Sequence[Episode], *, choices: str = "ABCDEFGHIJ") -> list[float]:
    r"""1 where the letter that the last assistant turn chooses is that of the task's answer.

    It is the last one in \boxed{}, or else after the word answer, or else the last one that stands alone.
    """
    letters = "".join(map(re.escape, choices))
    alone = rf"(?<![A-Za-z'])([{letters}])(?![A-Za-z'])"
    after = re.compile(rf"[Aa]nswer(?:\s+is)?\W{{0,8}}{alone}")

    def chosen(text: str) -> str | None:
        for part in _BOXED.findall(text)[::-1]:
            if found := re.findall(alone, part):
                return found[-1]
        found = after.findall(text) or re.findall(alone, text)
        return found[-1] if found else None

    expected = chosen(str(answer_of(task)))
    if expected is None:
        raise ValueError(f"the answer of task {task.id!r}, {task.answer!r}, is none of the choices {choices}")
    return judged(group, lambda text: chosen(text) == expected)


def regex(task: Task, group: Sequence[Episode], *, pattern: str) -> list[float]:
    """1 where the last assistant turn has `pattern` in it, as Python's re.search finds it."""
    del task
    try:
        compiled = re.compile(pattern)
    except re.error as problem:
        raise RewardError(f"reward regex: the pattern {pattern!r} is none: {problem}") from None
    return judged(group, lambda text: compiled.search(text) is not None)


def _value(text: str) -> Fraction | None:
    """The number that a text ends with."""
    for part in (*_BOXED.findall(text)[::-1], text):
        found = _NUMBER.findall(part)
        if found:
            try:
                return Fraction(found[-1].replace(",", ""))
            except ZeroDivisionError:
                return None
    return None
