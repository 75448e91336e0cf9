"""A recipe's reward over sample answers: what it gives and how long it takes, before anything is trained."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import cast, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.assemble.rewards import open_reward
from tandem.assemble.tasks import read_dataset
from tandem.data.files import file_rows
from tandem.errors import ConfigError, DataError, RewardError
from tandem.recipe import Recipe
from tandem.rewards.config import RewardConfig
from tandem.trainer.sampler import seed_of
from tandem.types import Episode, Key, Message, RewardResult, Stop, Task

Answer = tuple[str, Stop]
Judged = tuple[Task, tuple[Episode, ...], Sequence[RewardResult], float]
"""A task, answers to it, what they are worth, and the seconds that it took."""


def check(recipe: Recipe, answers: Path | None, count: int, console: Console) -> None:
    """answers: JSON lines with `task`, an id, and `text`, of which `completion` is the last turn where it has several, and perhaps
    `stop`; without them each task has its reference answer and an empty one.

    count: tasks at most. Raises RewardError where none of them can be judged.
    """
    if recipe.reward is None:
        raise ConfigError("the recipe has no reward to check: name one, e.g. reward.function=exact_match")
    dataset = read_dataset(recipe.data.train, "train", seed_of(recipe.seed, "tasks"))
    tasks = (dataset[i] for i in range(len(dataset)))
    if answers is None:
        asked = {task.id: (task, _samples(task)) for task, _ in zip(tasks, range(count), strict=False)}
    else:
        asked = _answered({task.id: task for task in tasks}, answers, count, dataset.name)
    groups = [(task, _episodes(task, given, i)) for i, (task, given) in enumerate(asked.values())]
    _show(asyncio.run(_judge(recipe.reward, groups)), console)


def _samples(task: Task) -> list[Answer]:
    imitated = [message.content for message in task.messages[len(task.asked().messages) :] if message.role == "assistant"]
    empty: Answer = ("", "stop")
    if imitated:
        return [(imitated[-1], "stop"), empty]
    if task.answer is None:
        return [empty]
    return [(task.answer if isinstance(task.answer, str) else json.dumps(task.answer), "stop"), empty]


def _answered(tasks: Mapping[str, Task], answers: Path, count: int, name: str) -> dict[str, tuple[Task, list[Answer]]]:
    found: dict[str, tuple[Task, list[Answer]]] = {}
    for where, row in file_rows(answers):
        identity, text, stop = row.get("task"), row.get("completion", row.get("text")), row.get("stop", "stop")
        if not isinstance(identity, str) or not isinstance(text, str):
            raise DataError(f"{where} needs task (an id) and text (an answer), both texts; it has {', '.join(row)}")
        if stop not in get_args(Stop):
            raise DataError(f"{where} says that it ended by stop={stop!r}; known: {', '.join(get_args(Stop))}")
        if identity not in tasks:
            raise DataError(f"{where} answers the task {identity!r}, which {name} has not; ids are like {next(iter(tasks))!r}")
        if identity in found or len(found) < count:
            found.setdefault(identity, (tasks[identity], []))[1].append((text, cast("Stop", stop)))
    if not found:
        raise DataError(f"{answers} holds no answers")
    return found


def _episodes(task: Task, answers: Sequence[Answer], ordinal: int) -> tuple[Episode, ...]:
    asked = task.asked()
    return tuple(
        Episode(Key("check", ordinal, member), asked, (), (*asked.messages, Message("assistant", text)), stop)
        for member, (text, stop) in enumerate(answers)
    )


async def _judge(config: RewardConfig, groups: Sequence[tuple[Task, tuple[Episode, ...]]]) -> list[Judged]:
    judged: list[Judged] = []
    async with open_reward(config) as reward:
        for task, group in groups:
            began_s = time.perf_counter()
            results = await reward(group[0].task, group)
            judged.append((task, group, results, time.perf_counter() - began_s))
    return judged


def _show(judged: Sequence[Judged], console: Console) -> None:
    table = Table("task", "answer", "reward", "parts or reason")
    for task, group, results, _ in judged:
        for episode, result in zip(group, results, strict=True):
            parts = ", ".join(f"{name} {value:g}" for name, value in result.components.items())
            value = Text("failed", style="red") if result.value is None else Text(f"{result.value:g}")
            table.add_row(Text(task.id), Text(_cut(episode.completion)), value, Text(_cut(parts or result.reason, 120)))
    console.print(table)
    results = [result for _, _, each, _ in judged for result in each]
    values = [result.value for result in results if result.value is not None]
    if not values:
        raise RewardError(f"none of {len(results)} answers could be judged: {results[0].reason}")
    times = [1000 * seconds for *_, seconds in judged]
    console.print(
        f"{len(values)} judged, mean {mean(values):.3f}, from {min(values):g} to {max(values):g}; "
        f"{len(results) - len(values)} failed; {median(times):.1f} ms a group (median), {max(times):.1f} at most",
        highlight=False,
        soft_wrap=True,
    )
    if len(set(values)) == 1 and len(values) > 1:
        console.print(
            f"warning: every answer is worth {values[0]:g}, so that nothing could be learned from them",
            style="yellow",
            soft_wrap=True,
        )


def _cut(text: str, most: int = 60) -> str:
    shown = text.replace("\n", " ⏎ ")
    return shown if len(shown) <= most else f"{shown[:most]}..."
