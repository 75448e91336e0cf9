"""A built-in reward: whether two formulas are equal, which math-verify reads and compares. An extra: `verify`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import math_verify  # pyright: ignore[reportMissingTypeStubs]

from tandem.rewards.functions import judged, said_of
from tandem.types import Episode, Task

_LIMIT_S = 2  # for reading what a model wrote, and for comparing two formulas; one that takes longer is not right
_PATIENCE_S = 30  # for reading the answer of a task, on a machine that does other things too
_BESIDE = r"(?:\s[a-z]+)?,?\s+or\s+(?:[a-z]+\s+)?(?:[a-z]\s*=\s*)?"  # from one number to the other, both said
_NUMBER = r"-?\d+(?:[.,/]\d+)*"
_library = cast("Any", math_verify)


def mathematics(task: Task, group: Sequence[Episode]) -> list[float]:
    r"""1 where the formula of the last assistant turn equals the task's answer: 1/2, \frac{1}{2} and 0.5 are the same.

    Numbers that agree to six decimals are equal: 0.333333 is 1/3, and 0.0000001 is 0.0000002.

    Of a text it is what stands in \boxed{}, or else the last formula, or a number after the word answer; one of several between
    which "or" stands is none. The answer is LaTeX, with or without dollar signs.
    """
    answer = said_of(task)
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    expected = _parsed(marked, _PATIENCE_S)
    if not expected:
        raise ValueError(f"the answer of task {task.id!r}, {answer!r}, is no formula that math-verify can read")

    def right(text: str) -> bool:
        found = _parsed(text)
        return _equal(expected, found) and all(_equal(expected, _parsed(f"${other}$")) for other in _beside(text, found))

    return judged(group, right)


def _beside(text: str, found: Sequence[Any]) -> list[str]:
    """The numbers that stand beside the one that was found, where it is said last: "2 or 3"."""
    said = re.escape(str(found[-1])) if found else ""
    last = [*re.finditer(rf"(?<![\w.]){said}(?![\w.]*\d)", text)][-1:] if said else []
    before = [re.search(rf"({_NUMBER}){_BESIDE}\Z", text[: each.start()]) for each in last]
    after = [re.match(rf"{_BESIDE}({_NUMBER})", text[each.end() :]) for each in last]
    return [other[1] for other in (*before, *after) if other is not None]


def _parsed(text: str, limit_s: int = _LIMIT_S) -> Any:
    return _library.parse(text, parsing_timeout=limit_s)


def _equal(expected: Any, found: Any) -> bool:
    return bool(_library.verify(expected, found, timeout_seconds=_LIMIT_S))
