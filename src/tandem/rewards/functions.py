"""Built-in reward functions: `function(task, group) -> one value an episode, in order`.

`FUNCTIONS` is the registry's table of them. Only an answer that came to its end counts, but for `number`, which is for models that
do not come to one yet. Each reads the task's answer before it looks at an episode, also of an empty group, and raises ValueError
for one that it cannot compare with. Imports nothing heavy, since every worker imports it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tandem.rewards.expression import evaluate
from tandem.types import Episode, Task

FUNCTIONS = {
    "exact_match": "tandem.rewards.functions:exact_match",
    "arithmetic": "tandem.rewards.functions:arithmetic",
    "sorting": "tandem.rewards.functions:exact_match",
    "countdown": "tandem.rewards.functions:countdown",
    "calculator": "tandem.rewards.functions:exact_match",
    "largest": "tandem.rewards.functions:number",
    "environment": "tandem.rewards.functions:environment",
    "numeric": "tandem.rewards.verifiers:numeric",
    "choice": "tandem.rewards.verifiers:choice",
    "reasoning_gym": "tandem.rewards.reasoning:reasoning",
    "code": "tandem.rewards.code:code",
    "regex": "tandem.rewards.verifiers:regex",
    "math": "tandem.rewards.mathematics:mathematics",
    "json_schema": "tandem.rewards.schema:json_schema",
}
_WHOLE = r"-?[0-9]{1,18}"


def exact_match(task: Task, group: Sequence[Episode]) -> list[float]:
    """1 where the last assistant turn, white space at its ends aside, is the task's answer."""
    answer = said_of(task).strip()
    return judged(group, lambda text: text == answer)


def arithmetic(task: Task, group: Sequence[Episode]) -> list[float]:
    """1 where the last assistant turn is one whole number, and the task's answer."""
    answer = _whole(task)
    return judged(group, lambda text: re.fullmatch(_WHOLE, text) is not None and int(text) == answer)


def countdown(task: Task, group: Sequence[Episode]) -> list[float]:
    """1 where the last assistant turn is an expression that reaches the target.

    The task's answer is {"numbers", "target", "use"}: each number exactly once (use "all") or at most once ("some").
    """
    problem: Any = answer_of(task)
    try:
        given, target, use = Counter[int](problem["numbers"]), int(problem["target"]), str(problem["use"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{_answer(task)}, has not the form {{'numbers': [...], 'target': ..., 'use': 'all' or 'some'}}") from None

    def right(text: str) -> bool:
        try:
            value, numbers = evaluate(text)
        except (ValueError, ZeroDivisionError):
            return False
        used = Counter(numbers)
        return value == target and (used <= given if use == "some" else used == given)

    return judged(group, right)


def number(task: Task, group: Sequence[Episode]) -> list[float]:
    """0.7 where the last number in the answer is right, 0.3 more where it also came to its end. Numbers are whole ones.

    For a model that can talk, and is cut off in training before it has learned to be brief.
    """
    answer = _whole(task)

    def graded(episode: Episode) -> float:
        numbers = re.findall(_WHOLE, episode.completion)
        right = bool(numbers) and int(numbers[-1]) == answer
        return 0.7 * right + 0.3 * (right and episode.stop == "stop")

    return [graded(episode) for episode in group]


def environment(task: Task, group: Sequence[Episode]) -> list[float]:
    """The sum of what the environment gave, step by step."""
    del task
    return [float(sum(episode.env_rewards)) for episode in group]


def judged(group: Sequence[Episode], right: Callable[[str], bool]) -> list[float]:
    """1 where an answer came to its end and is right, as `right` says of it without the white space at its ends."""
    return [float(episode.stop == "stop" and right(episode.completion.strip())) for episode in group]


def answer_of(task: Task) -> object:
    """Raises ValueError where there is none."""
    if task.answer is None:
        raise ValueError(f"task {task.id!r} has no answer to compare with")
    return task.answer


def said_of(task: Task) -> str:
    """The task's answer as a text. Raises ValueError where it is none, and no number."""
    answer = answer_of(task)
    if not isinstance(answer, str | int | float):
        raise ValueError(f"{_answer(task)}, must be a text or a number to compare with")
    return str(answer)


def _whole(task: Task) -> int:
    if re.fullmatch(_WHOLE, said := said_of(task).strip()) is None:
        raise ValueError(f"{_answer(task)}, is no whole number")
    return int(said)


def _answer(task: Task) -> str:
    return f"the answer of task {task.id!r}, {str(task.answer)[:60]!r}"
