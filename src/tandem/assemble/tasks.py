"""Where tasks come from: built-in ones, files, datasets of the hub, and several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from tandem.data.builtin import Demonstrations, NoiseConfig, Pairs, Problem, Split, TaskSet
from tandem.data.check import in_both
from tandem.data.curriculum import by_pass_rate
from tandem.data.files import FileDataset, file_rows
from tandem.data.hub import HubDataset
from tandem.data.reasoning import PREFIX, ReasoningTasks
from tandem.data.selection import Kept, Mixture
from tandem.data.tasks import TASKS
from tandem.errors import ConfigError
from tandem.ports import Dataset, Renderer
from tandem.recipe import DatasetSection, Recipe, SourceSection
from tandem.registry import resolve
from tandem.types import Task

Form = Literal["tasks", "demonstrations", "pairs"]


def sections(recipe: Recipe) -> list[DatasetSection]:
    """What a recipe names as data, of every phase."""
    warmup = recipe.warmup.data if recipe.warmup is not None else None
    return [section for section in (recipe.data.train, recipe.data.heldout, warmup) if section is not None]


def check_files(*data: DatasetSection | None) -> None:
    """Raises DataError for a file that is not there or of an unknown kind, before anything slow; what is in them is read later."""
    for section in data:
        for source in () if section is None else section.sources or (section,):
            if source.path is not None:
                file_rows(source.path)


def problem(name: str) -> type[Problem]:
    """A built-in task by name, or one of your own by path."""
    return cast("type[Problem]", resolve(name, TASKS, kind="task"))


def build_dataset(section: DatasetSection, split: Split, seed: int, renderer: Renderer, form: Form = "tasks") -> Dataset:
    """form: what a built-in task is to give: problems, solved ones, or each with a right and a wrong response.

    Raises DataError for one that is empty, missing or broken, ConfigError for demonstrations where pairs are wanted.
    """
    dataset, most = read_dataset(section, split, seed, form), section.max_tokens
    if section.curriculum is not None:
        dataset = by_pass_rate(dataset, section.curriculum)
    if most is None:
        return dataset
    return Kept(dataset, lambda task: _tokens(task, renderer, form) <= most, f"more than max_tokens={most} tokens")


def read_dataset(section: DatasetSection, split: Split, seed: int, form: Form = "tasks") -> Dataset:
    """The same with the tasks that are too long."""
    if not section.sources:
        return _origin(section, split, seed, form)
    datasets = [_origin(source, split, seed, form) for source in section.sources]
    return Mixture(datasets, [source.weight or len(each) for source, each in zip(section.sources, datasets, strict=True)])


def notes(*datasets: Dataset | None) -> tuple[str, ...]:
    """What a user should know of what was left out of them."""
    return tuple(said for dataset in datasets if isinstance(dataset, Kept) for said in dataset.notes)


def overlaps(trained: Mapping[str, Dataset], heldout: Sequence[Dataset]) -> list[str]:
    """Warnings of held-out tasks that are trained on. trained: by the section of the recipe.

    The splits of built-in problems do not overlap, whatever their seeds, and are not compared: that would draw all of them.
    """
    drawn, found = (Demonstrations, Pairs, TaskSet), list[str]()
    for what, train in trained.items():
        for other in heldout:
            if isinstance(train, drawn) and isinstance(other, drawn):
                continue
            if said := in_both((train[i] for i in range(len(train))), [other[i] for i in range(len(other))], what):
                found.append(f"{said}: what is measured on them may be remembered; take them out of one of the two")
    return found


def _tokens(task: Task, renderer: Renderer, form: Form) -> int:
    if form == "tasks":
        return len(renderer.opening(task.asked().messages))
    written = (task.chosen, task.rejected) if form == "pairs" else ((),)
    return max(len(renderer.demonstration((*task.messages, *response))[0]) for response in written)


def _origin(section: DatasetSection | SourceSection, split: Split, seed: int, form: Form) -> Dataset:
    if section.path is not None:
        return FileDataset(section.path, section.columns)
    if section.hub is not None:
        return HubDataset(section.hub, section.columns)
    assert section.task is not None
    if section.task.startswith(PREFIX):
        if form != "tasks" or section.demonstrations is not None:
            raise ConfigError(
                f"{section.task} has questions with answers, and neither demonstrations nor pairs: write them to a file"
            )
        return ReasoningTasks(section.task, split, seed=seed, size=section.size)
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
