"""Where tasks come from: built-in ones and files."""

from __future__ import annotations

from typing import cast

from tandem.data.builtin import Demonstrations, Problem, Split, TaskSet
from tandem.data.files import FileDataset
from tandem.data.tasks import TASKS
from tandem.ports import Dataset
from tandem.recipe import DatasetSection
from tandem.registry import resolve


def problem(name: str) -> type[Problem]:
    """A built-in task by name, or one of your own by path."""
    return cast("type[Problem]", resolve(name, TASKS, kind="task"))


def build_dataset(section: DatasetSection, split: Split, seed: int) -> Dataset:
    """Raises DataError for one that is empty, missing or broken."""
    if section.path is not None:
        return FileDataset(section.path, section.columns)
    assert section.task is not None
    kind = problem(section.task)
    if section.demonstrations is not None:
        return Demonstrations(kind, split, seed=seed, size=section.size, noise=section.demonstrations)
    return TaskSet(kind, split, seed=seed, size=section.size)
