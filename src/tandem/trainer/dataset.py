"""Batches from a dataset: supervised fine-tuning, preferences and distillation are the same loop with this as its source.

What rows a task becomes is a `RowMaker`'s: a demonstration is a group of one row, a pair of responses a group of two. It
neither packs rows together nor cuts long ones.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from tandem.data_proto import DataProto
from tandem.errors import DataError
from tandem.ports import Dataset, Renderer, TransferQueue
from tandem.trainer.intake import Intake
from tandem.trainer.sampler import TaskOrder, seed_of
from tandem.trainer.schedule import schedule
from tandem.types import BatchRef, GroupKey, Json, Key, Message, Metrics, PolicyRef, Task


class RowMaker(Protocol):
    """What rows a task becomes. places: how many, a group of them; columns: theirs."""

    places: ClassVar[int]
    columns: ClassVar[frozenset[str]]

    def fits(self, task: Task) -> bool:
        """Whether the task has what rows are made of."""
        ...

    def rows(self, task: Task, group: GroupKey) -> DataProto:
        """Raises DataError for a task that cannot be trained on, which the caller names."""
        ...


@dataclass(frozen=True)
class Demonstrations:
    """A row a task: its conversation, whose assistant turns are imitated. max_context: a longer one is an error."""

    renderer: Renderer
    max_context: int
    places: ClassVar[int] = 1
    columns: ClassVar[frozenset[str]] = frozenset({"tokens", "mask", "temperature"})

    def fits(self, task: Task) -> bool:
        return any(message.role == "assistant" for message in task.messages)

    def rows(self, task: Task, group: GroupKey) -> DataProto:
        return _packed([Key(*group)], [_rendered(self.renderer, task.messages, 0, self.max_context, "the conversation")])


@dataclass(frozen=True)
class Comparisons:
    """Two rows a task, told apart by row column `chosen`: its prompt with each response. max_context: of each of them.

    Row column `margins` is the pair's `margin`, from the task's info: by how much chosen is better, 0 where it does not say.
    """

    renderer: Renderer
    max_context: int
    places: ClassVar[int] = 2
    columns: ClassVar[frozenset[str]] = Demonstrations.columns | {"chosen", "margins"}

    def fits(self, task: Task) -> bool:
        return bool(task.chosen and task.rejected)

    def rows(self, task: Task, group: GroupKey) -> DataProto:
        if not self.fits(task):
            raise DataError("it has no chosen and rejected response, which are compared: name their columns with `columns`")
        margin = task.info.get("margin", 0.0)
        if not isinstance(margin, int | float):
            raise DataError(f"its margin is {margin!r}; it must be a number")
        prompt = len(task.messages)
        sides = [
            _rendered(self.renderer, (*task.messages, *response), prompt, self.max_context, f"the prompt with its {name} response")
            for name, response in (("chosen", task.chosen), ("rejected", task.rejected))
        ]
        heads = [tokens[: mask.index(True)] for tokens, mask in sides]
        if heads[0] != heads[1]:
            raise DataError("the chat template writes its prompt otherwise before the one response than before the other")
        rows = _packed([Key(*group, member) for member in range(2)], sides)
        return rows.with_columns(row={"chosen": torch.tensor([True, False]), "margins": torch.full((2,), float(margin))})


def task_rows(dataset: Dataset, index: int, maker: RowMaker, group: GroupKey) -> DataProto:
    """The rows of the task at this position. Raises DataError that says which task cannot be trained on, and why."""
    task = dataset[index]
    try:
        return maker.rows(task, group)
    except DataError as problem:
        raise DataError(f"task {task.id!r} of {dataset.name!r}: {problem}") from problem


def _rendered(
    renderer: Renderer, messages: Sequence[Message], given: int, max_context: int, what: str
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    tokens, mask = renderer.demonstration(messages, given=given)
    if len(tokens) > max_context:
        raise DataError(
            f"{what} has {len(tokens)} tokens, above max_context={max_context}; nothing is cut: leave it out or raise the limit"
        )
    return tokens, mask


def _packed(keys: Sequence[Key], rendered: Sequence[tuple[tuple[int, ...], tuple[bool, ...]]]) -> DataProto:
    return DataProto.make(
        keys,
        [len(tokens) for tokens, _ in rendered],
        token={
            "tokens": torch.tensor([token for tokens, _ in rendered for token in tokens]),
            "mask": torch.tensor([counts for _, mask in rendered for counts in mask]),
        },
        row={"temperature": torch.ones(len(rendered))},
    )


LOOKED_AT = 1024  # tasks whose rows are made before a run begins, in a few seconds


class DatasetSource:
    """Implements ports.Source over the rows that `maker` makes of each task."""

    def __init__(
        self,
        *,
        dataset: Dataset,
        maker: RowMaker,
        queue: TransferQueue,
        tasks_per_step: int,
        seed: int,
        policy: PolicyRef,
        space: str = "demonstrations",
        shuffled: bool = True,
    ) -> None:
        """Raises DataError where one of the first LOOKED_AT tasks cannot be trained on; others are looked at when they come."""
        self.dataset, self._maker, self._queue = dataset, maker, queue
        self._order = TaskOrder(len(dataset), seed_of(seed, space), f"dataset {dataset.name!r}", shuffled=shuffled)
        self._intake = Intake(queue, space, tasks_per_step, schedule("sync"), policy)
        for index in range(min(LOOKED_AT, len(dataset))):
            task_rows(dataset, index, maker, GroupKey(space, index))

    @property
    def columns(self) -> frozenset[str]:
        """Of the rows that it gives."""
        return self._maker.columns

    @property
    def policy(self) -> PolicyRef:
        return self._intake.policy

    async def __aiter__(self) -> AsyncGenerator[BatchRef]:
        while True:
            self._intake.open()
            while self._intake.is_open:
                group, _ = await self._intake.admit(self._maker.places)
                await self._queue.put(task_rows(self.dataset, self._order.position(group.ordinal), self._maker, group))
            yield self._intake.hand_out(await self._intake.take())

    async def advance(self, policy: PolicyRef) -> Metrics:
        epochs = self._intake.num_admitted / len(self.dataset)
        return await self._intake.advance(policy) + Metrics.mean({"data/epochs": epochs})

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        """Nothing to pause."""
        yield

    def state(self) -> dict[str, Json]:
        return self._intake.state()

    def restore(self, state: Mapping[str, Json]) -> None:
        self._intake.restore(state)
