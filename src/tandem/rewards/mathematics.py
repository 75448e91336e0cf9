"""A built-in reward: whether two formulas are equal, which math-verify reads and compares. An extra: `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import math_verify  # pyright: ignore[reportMissingTypeStubs]

from tandem.rewards.functions import answer_of, judged
from tandem.types import Episode, Task

_LIMIT_S = 2  # for reading an answer, and for comparing two; one that takes longer is not right
_library = cast("Any", math_verify)


def mathematics(task: Task, group: Sequence[Episode]) -> list[float]:
    r"""1 where the formula of the last assistant turn equals the task's answer: 1/2, \frac{1}{2} and 0.5 are the same.

    Numbers that agree to six decimals are equal: 0.333333 is 1/3, and 0.0000001 is 0.0000002.

    Of a text it is what stands in \boxed{}, or else the last formula. The answer is LaTeX, with or without dollar signs.
    """
    answer = str(answer_of(task))
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    expected = _library.parse(marked, parsing_timeout=_LIMIT_S)
    if not expected:
        raise ValueError(f"the answer of task {task.id!r}, {answer!r}, is no formula that math-verify can read")
    return judged(group, lambda text: bool(_equal(expected, _library.parse(text, parsing_timeout=_LIMIT_S))))


def _equal(expected: Any, found: Any) -> bool:
    return _library.verify(expected, found, timeout_seconds=_LIMIT_S)
