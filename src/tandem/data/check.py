"""What was understood of a data file: its layout, a task as it is read, lengths, truncations, and what is twice.

`inspect` reads and counts; `show` prints. Nothing here changes a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.data.files import FileDataset, file_rows
from tandem.ports import Renderer
from tandem.types import Message, Task

Lengths = Sequence[int]


@dataclass(frozen=True)
class Checked:
    """columns: of the file. tasks: one a row. lengths: what was measured to a length a task that has it, in `unit`s. too_long:
    tasks whose prompt is longer than the limit. again: tasks whose prompt an earlier one of the file has.
    """

    path: Path
    columns: tuple[str, ...]
    tasks: tuple[Task, ...]
    unit: str
    lengths: Mapping[str, Lengths]
    too_long: int
    again: int


def inspect(path: Path, columns: Mapping[str, str], renderer: Renderer | None = None, max_tokens: int | None = None) -> Checked:
    """renderer: counts tokens; without one characters are counted. max_tokens: of a prompt. Raises DataError for what is wrong."""
    dataset = FileDataset(path, columns)
    tasks = tuple(dataset[i] for i in range(len(dataset)))
    names = tuple(dict.fromkeys(name for _, row in file_rows(path) for name in row))

    def prompt(messages: Sequence[Message]) -> int:
        return _characters(messages) if renderer is None else len(renderer.opening(messages))

    def whole(messages: Sequence[Message]) -> int:
        return _characters(messages) if renderer is None else len(renderer.demonstration(messages)[0])

    prompts = [prompt(task.asked().messages) for task in tasks]
    lengths: dict[str, list[int]] = {"prompt": prompts}
    lengths["conversation"] = [whole(task.messages) for task in tasks if task.messages != task.asked().messages]
    lengths["with chosen"] = [whole((*task.messages, *task.chosen)) for task in tasks if task.chosen]
    lengths["with rejected"] = [whole((*task.messages, *task.rejected)) for task in tasks if task.rejected]
    return Checked(
        path=path,
        columns=names,
        tasks=tasks,
        unit="characters" if renderer is None else "tokens",
        lengths={what: found for what, found in lengths.items() if found},
        too_long=0 if max_tokens is None else sum(length > max_tokens for length in prompts),
        again=len(tasks) - len({_asked(task) for task in tasks}),
    )


def show(train: Checked, heldout: Checked | None, max_tokens: int | None, console: Console) -> None:
    """Everything, with what needs attention in yellow."""
    files = [train] if heldout is None else [train, heldout]
    for checked in files:
        _show_file(checked, max_tokens, console)
    if heldout is not None:
        if said := in_both(train.tasks, heldout.tasks, str(train.path)):
            _warn(console, said)
        else:
            console.print(f"no prompt of {heldout.path} is in {train.path}", highlight=False, soft_wrap=True)


def in_both(train: Iterable[Task], heldout: Sequence[Task], what: str) -> str | None:
    """How many held-out tasks ask what tasks of `what` ask, with one of them; None where none does."""
    asked = [_asked(task) for task in heldout]
    both = set(asked) & {_asked(task) for task in train}
    if not both:
        return None
    return f"{sum(each in both for each in asked)} of {len(asked)} held-out prompts are in {what} too, e.g. {_cut(min(both))}"


def _show_file(checked: Checked, max_tokens: int | None, console: Console) -> None:
    tasks, first = checked.tasks, checked.tasks[0]
    console.print(Text(f"{checked.path}: {len(tasks):,} tasks", style="bold"), soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in _understood(checked, first):
        table.add_row(name, Text(value))
    console.print(table)
    table = Table("length in " + checked.unit, "least", "median", "95 %", "most", "of")
    for column in table.columns[1:]:
        column.justify = "right"
    for what, found in checked.lengths.items():
        ordered = sorted(found)
        numbers = (ordered[0], median(ordered), ordered[min(len(ordered) * 95 // 100, len(ordered) - 1)], ordered[-1], len(ordered))
        table.add_row(what, *(f"{number:,.0f}" for number in numbers))
    console.print(table)
    if max_tokens is not None and checked.too_long:
        _warn(console, f"{checked.too_long} prompts have more than {max_tokens} tokens: data.train.max_tokens leaves them out")
    if checked.again:
        _warn(console, f"{checked.again} tasks ask what an earlier one of the file asks")
    without = sum(task.answer is None and not task.chosen and task.asked() == task for task in tasks)
    if nothing := sum(not _asked(task) for task in tasks):
        _warn(console, f"{nothing} tasks ask nothing: their prompt is blank, or begins with the assistant")
    if without:
        _warn(console, f"{without} tasks have neither answer nor anything to imitate: only a reward that needs none can use them")


def _understood(checked: Checked, first: Task) -> list[tuple[str, str]]:
    """What each part of the first task is."""
    found = [("columns", ", ".join(checked.columns))]
    if {"data_source", "reward_model"} <= {*checked.columns}:
        found.append(("layout", "verl's: the answer is reward_model.ground_truth"))
    sources = sorted({task.source for task in checked.tasks})
    found.append(("source", ", ".join(sources[:5]) + (f" and {len(sources) - 5} more" if len(sources) > 5 else "")))
    found.append(("first id", first.id))
    found += [(f"first {message.role}", _cut(message.content)) for message in first.messages]
    found += [("chosen", _cut(_joined(first.chosen))), ("rejected", _cut(_joined(first.rejected)))] if first.chosen else []
    found.append(("first answer", "none" if first.answer is None else _cut(json.dumps(first.answer, ensure_ascii=False))))
    if first.info:
        found.append(("info", ", ".join(first.info)))
    return found


def _warn(console: Console, text: str) -> None:
    console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)


def _asked(task: Task) -> str:
    """What a task asks, without what is only typography: case and white space."""
    return " ".join(_joined(task.asked().messages).casefold().split())


def _joined(messages: Sequence[Message]) -> str:
    return "\n".join(message.content for message in messages)


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(message.content) for message in messages)


def _cut(text: str) -> str:
    shown = text.replace("\n", " ⏎ ")
    return shown if len(shown) <= 160 else f"{shown[:160]}..."
