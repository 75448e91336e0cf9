"""Batches from demonstrations: supervised fine-tuning is the same loop with this as its source.

It neither packs rows together nor cuts long ones.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from tandem.data_proto import DataProto
from tandem.errors import DataError
from tandem.ports import Dataset, Renderer, TransferQueue
from tandem.trainer.intake import Intake
from tandem.trainer.sampler import TaskOrder, seed_of
from tandem.trainer.schedule import schedule
from tandem.types import BatchRef, GroupKey, Json, Key, Metrics, PolicyRef


@dataclass(frozen=True)
class DatasetSourceConfig:
    """rows_per_step: demonstrations in a batch. max_context: of one demonstration; a longer one is an error."""

    rows_per_step: int = 32
    max_context: int = 2048

    def __post_init__(self) -> None:
        for name in ("rows_per_step", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class DatasetSource:
    """Implements ports.Source. Each demonstration is a group of one row; what is imitated is the renderer's mask."""

    columns: ClassVar[frozenset[str]] = frozenset({"tokens", "mask", "temperature"})
    """Of the rows that it gives."""

    def __init__(
        self,
        *,
        dataset: Dataset,
        renderer: Renderer,
        queue: TransferQueue,
        config: DatasetSourceConfig,
        seed: int,
        policy: PolicyRef,
        space: str = "demonstrations",
    ) -> None:
        self._dataset, self._renderer = dataset, renderer
        self._queue, self._config = queue, config
        self._order = TaskOrder(len(dataset), seed_of(seed, space), f"dataset {dataset.name!r}")
        self._intake = Intake(queue, space, config.rows_per_step, schedule("sync"), policy)

    @property
    def policy(self) -> PolicyRef:
        return self._intake.policy

    async def __aiter__(self) -> AsyncGenerator[BatchRef]:
        while True:
            self._intake.open()
            while self._intake.is_open:
                group = await self._intake.admit(1)
                await self._queue.put(self._row(group))
            yield self._intake.hand_out(await self._intake.take())

    async def advance(self, policy: PolicyRef) -> Metrics:
        epochs = self._intake.num_admitted / len(self._dataset)
        return await self._intake.advance(policy) + Metrics.mean({"data/epochs": epochs})

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        """Nothing to pause."""
        yield

    def state(self) -> dict[str, Json]:
        return self._intake.state()

    def restore(self, state: Mapping[str, Json]) -> None:
        self._intake.restore(state)

    def _row(self, group: GroupKey) -> DataProto:
        task = self._dataset[self._order.position(group.ordinal)]
        try:
            tokens, mask = self._renderer.demonstration(task.messages)
        except DataError as problem:
            raise DataError(f"task {task.id!r} of {self._dataset.name!r}: {problem}") from problem
        if len(tokens) > self._config.max_context:
            raise DataError(
                f"task {task.id!r} of {self._dataset.name!r} has {len(tokens)} tokens, above "
                f"max_context={self._config.max_context}; nothing is cut: leave it out or raise the limit"
            )
        if not any(mask):
            raise DataError(f"task {task.id!r} of {self._dataset.name!r} has no assistant turn, so there is nothing to imitate")
        return DataProto.make(
            [Key(*group)],
            [len(tokens)],
            token={"tokens": torch.tensor(tokens), "mask": torch.tensor(mask)},
            row={"temperature": torch.ones(1)},
        )
