"""Where tasks come from: built-in ones and files."""

from __future__ import annotations

from typing import Literal, cast

from tandem.data.builtin import Demonstrations, NoiseConfig, Pairs, Problem, Split, TaskSet
from tandem.data.files import FileDataset
from tandem.data.tasks import TASKS
from tandem.errors import ConfigError
from tandem.ports import Dataset
from tandem.recipe import DatasetSection
from tandem.registry import resolve

Form = Literal["tasks", "demonstrations", "pairs"]


def problem(name: str) -> type[Problem]:
    """A built-in task by name, or one of your own by path."""
    return cast("type[Problem]", resolve(name, TASKS, kind="task"))


def build_dataset(section: DatasetSection, split: Split, seed: int, form: Form = "tasks") -> Dataset:
    """form: what a built-in task is to give: problems, solved ones, or each with a right and a wrong response.

    Raises DataError for one that is empty, missing or broken, ConfigError for demonstrations where pairs are wanted.
    """
    if section.path is not None:
        return FileDataset(section.path, section.columns)
    assert section.task is not None
    kind = problem(section.task)
    if form == "pairs":
        if section.demonstrations is not None:
            raise ConfigError(f"data asks for demonstrations of {section.task}, and pairs are compared: leave demonstrations out")
        return Pairs(kind, split, seed=seed, size=section.size, refusal_frac=section.refusal_frac)
    if section.refusal_frac:
        raise ConfigError(f"data has refusal_frac={section.refusal_frac}, which is of pairs, and here are none: leave it out")
    if section.demonstrations is not None or form == "demonstrations":
        noise = section.demonstrations or NoiseConfig(bad_frac=0.0)
        return Demonstrations(kind, split, seed=seed, size=section.size, noise=noise)
    return TaskSet(kind, split, seed=seed, size=section.size)
