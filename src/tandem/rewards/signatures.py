"""The three ways in which people write reward functions, told apart by the names of their arguments.

    ours    f(task, group, **params)                                           a value for each episode of the group
    verl's  f(data_source, solution_str, ground_truth, extra_info, **params)   the value of one episode
            f(data_sources, solution_strs, ground_truths, extra_infos, **params)   of many
    TRL's   f(prompts, completions, **columns)                                 of many; columns are lists

`adapted` makes each of them the first. A function may leave out what it does not read, and verl's and TRL's may be `async`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, cast

from tandem.errors import RewardError
from tandem.types import Episode, Json, Message, RewardResult, Task

RewardFunction = Callable[[Task, Sequence[Episode]], Any]
_FORMS = "(task, group), verl's (data_source, solution_str, ground_truth, extra_info) or TRL's (prompts, completions, and columns)"
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_MANY = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}


def adapted(function: Callable[..., Any], name: str, params: Mapping[str, Json], *, built_in: bool = False) -> RewardFunction:
    """`function` as one of (task, group), with its params. Raises RewardError where it is none of the three, or two of them.

    For a group of nobody a built-in function looks at the task's answer. One of somebody's own is not called: there is a
    RewardError where TRL's lacks columns of the task, or verl's an answer that it cannot do without.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise RewardError(f"reward function {name!r} does not say what it takes: write a function around it") from None
    names = {parameter.strip("_") for parameter in signature.parameters}
    marks = {
        "ours": {"task", "group"} <= names,
        "verl's": "solution_str" in names,
        "verl's for many": "solution_strs" in names,
        "TRL's": "completions" in names,
    }
    found = [form for form, there in marks.items() if there]
    if len(found) != 1:
        is_what = "has arguments of " + " and ".join(found) if found else "has no argument that says how it is called"
        raise RewardError(f"reward function {name!r} {is_what}, {_written(signature)}: name its arguments {_FORMS}")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())

    def taken(offered: Mapping[str, Any]) -> dict[str, Any]:
        """What the function takes of what there is, and its params."""
        return {key: value for key, value in offered.items() if takes_any or key in signature.parameters} | dict(params)

    def check(*given: Any, **named: Any) -> None:
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            raise RewardError(f"reward function {name!r} cannot be called as one of {_FORMS}: {error}") from None

    def answered(task: Task) -> None:
        needed = [each for each in ("ground_truth", "ground_truths") if each in signature.parameters.keys() - params.keys()]
        if task.answer is None and any(signature.parameters[each].default is inspect.Parameter.empty for each in needed):
            raise RewardError(
                f"reward function {name!r} takes {needed[0]}, and the task has no answer: name its column (`answer`, or "
                f"`reward_model.ground_truth` in verl's layout), or write {needed[0]}=None if the function does without"
            )

    match found[0]:
        case "ours":
            check((), (), **params)
            return lambda task, group: function(task, group, **params) if group or built_in else []
        case "verl's":
            check(**taken(dict.fromkeys(_VERL)))

            def one_by_one(task: Task, group: Sequence[Episode]) -> list[Any]:
                answered(task)
                return _one_by_one(function, name, [taken(_verl(task, episode)) for episode in group])

            return one_by_one
        case "verl's for many":
            check(**taken(dict.fromkeys(_MANY)))

            def many(task: Task, group: Sequence[Episode]) -> Any:
                answered(task)
                rows = [_verl(task, episode) for episode in group]
                given = taken({ours: [row[one] for row in rows] for ours, one in _MANY.items()})
                return _scored(name, _result(function(**given))) if group else []

            return many
        case _:

            def columns(task: Task, group: Sequence[Episode]) -> Any:
                given = taken(_columns(task, group))
                check(**given)
                return _result(function(**given)) if group else []

            return columns


def _verl(task: Task, episode: Episode) -> dict[str, Any]:
    """extra_info is the column of that name where the data has one, else all of the task's info."""
    extra = task.info.get("extra_info", dict(task.info))
    return dict(zip(_VERL, (task.source, episode.completion, task.answer, extra), strict=True))


def _one_by_one(function: Callable[..., Any], name: str, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    values: list[Any] = [function(**call) for call in calls]
    if any(inspect.isawaitable(value) for value in values):
        values = asyncio.run(_all(values))
    return _scored(name, values)


async def _all(values: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*values))


def _result(value: Any) -> Any:
    return asyncio.run(_one(value)) if inspect.isawaitable(value) else value


async def _one(value: Any) -> Any:
    return await value


def _scored(name: str, values: Any) -> Any:
    """What verl takes: a number, or {"score": number, more}, whose further numbers become components."""
    return [_score(name, value) for value in cast("Sequence[Any]", values)] if isinstance(values, Sequence) else values


def _score(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    given = dict(cast("Mapping[str, Any]", value))
    if "score" not in given:
        raise RewardError(f"reward function {name!r} returned {value!r}; a dict must have a score")
    score = given.pop("score")
    if not isinstance(score, SupportsFloat):
        return score
    parts = {key: float(part) for key, part in given.items() if isinstance(part, SupportsFloat)}
    bad = next((part for part in (float(score), *parts.values()) if not math.isfinite(part)), None)
    return RewardResult(float(score), parts) if bad is None else RewardResult.failed(f"the reward function returned {bad}")


def _columns(task: Task, group: Sequence[Episode]) -> dict[str, Any]:
    """TRL's: a list with one entry an episode each; texts where the data has texts, and lists of messages where it has those."""
    one: dict[str, Any] = {
        **task.info,
        "answer": task.answer,
        "ground_truth": task.answer,
        "data_source": task.source,
        "id": task.id,
        "prompts": _messages(task.messages) if task.chat else task.messages[-1].content,
    }
    columns = {key: [value] * len(group) for key, value in one.items()}
    asked = len(task.messages)
    columns["completions"] = [_messages(each.messages[asked:]) if task.chat else each.completion for each in group]
    columns["completion_ids"] = [each.samples[-1].tokens[each.samples[-1].mask].tolist() if each.samples else [] for each in group]
    return columns


def _messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _written(signature: inspect.Signature) -> str:
    return "(" + ", ".join(signature.parameters) + ")"
