"""Tasks by how often they were solved: those that are too easy or too hard are left out, and the easy ones may come first."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tandem.data.files import file_rows
from tandem.data.selection import Kept
from tandem.errors import DataError
from tandem.ports import Dataset
from tandem.types import Task


@dataclass(frozen=True)
class CurriculumConfig:
    """rates: a run's samples.jsonl, or other JSON lines with task (an id) and reward; without it, column pass_rate of the data.

    least, most: a task whose pass rate is outside is left out, and so is one whose rate nothing says. easy_first: in the order of
    their rates, the same in each epoch, and not shuffled. solved: the reward from which a sample counts as passed.
    """

    rates: Path | None = None
    least: float = 0.0
    most: float = 1.0
    easy_first: bool = False
    solved: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most <= 1:
            raise ValueError(f"least={self.least} and most={self.most} are no range of pass rates, which are from 0 to 1")


def by_pass_rate(dataset: Dataset, config: CurriculumConfig) -> Kept:
    """Raises DataError for rates that are none, and where no task is left."""
    known = None if config.rates is None else _rates(config.rates, config.solved)

    def rate(task: Task) -> float | None:
        return _column(task) if known is None else known.get(task.id)

    def keep(task: Task) -> bool:
        value = rate(task)
        return value is not None and config.least <= value <= config.most

    why = f"no pass rate from {config.least:g} to {config.most:g}"
    return Kept(dataset, keep, why, order=(lambda task: -(rate(task) or 0.0)) if config.easy_first else None)


def _rates(path: Path, solved: float) -> dict[str, float]:
    """By task. A sample that could not be judged is in none."""
    passed: defaultdict[str, list[bool]] = defaultdict(list)
    for where, row in file_rows(path):
        identity, reward = row.get("task"), row.get("reward")
        if not isinstance(identity, str) or not isinstance(reward, int | float | None):
            raise DataError(f"{where} needs task (an id) and reward (a number, or null); it has {', '.join(row)}")
        if reward is not None:
            passed[identity].append(reward >= solved)
    return {identity: sum(each) / len(each) for identity, each in passed.items()}


def _column(task: Task) -> float | None:
    value = task.info.get("pass_rate")
    if value is not None and (not isinstance(value, int | float) or not 0 <= value <= 1):
        raise DataError(f"task {task.id!r} has pass_rate {value!r}; it must be a number from 0 to 1")
    return value
