"""The update: mini-batches and epochs over one batch, for every role that is trained. It holds handles, workers hold models.

Denominators belong to an optimiser step: each mini-batch is weighed as a whole (`TrainWorker.weigh`) before a group splits
it over its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tandem.errors import EmptyBatchError
from tandem.ports import WorkerGroup
from tandem.trainer.workers import TrainWorker
from tandem.types import BatchRef, Metrics, PolicyRef, Unit


@dataclass(frozen=True)
class LearnerConfig:
    """epochs: passes over a batch. minibatches: optimiser steps a pass, of whole groups in seeded order.
    on_empty: what a mini-batch without a token to train on does: stop the run, or be counted and skipped.
    """

    epochs: int = 1
    minibatches: int = 1
    on_empty: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Trained:
    """A role that is trained: its TrainWorkers.

    unit: what stays together where a mini-batch is split over ranks. from_version: of the policy, at which its training begins.
    """

    workers: WorkerGroup
    unit: Unit = "row"
    from_version: int = 0


class MinibatchLearner:
    """Implements ports.Learner. Each mini-batch trains each role in turn. It has no state of its own."""

    def __init__(self, roles: Sequence[Trained], config: LearnerConfig, *, seed: int) -> None:
        self._roles = tuple(roles)
        self._config = config
        self._seed = seed

    async def update(self, batch: BatchRef, policy: PolicyRef) -> Metrics:
        metrics = Metrics()
        for number, part in enumerate(self._minibatches(batch)):
            for role in self._roles:
                if policy.version >= role.from_version:
                    metrics += await self._step(role.workers, replace(part, unit=role.unit), first=number == 0)
        return metrics

    async def _step(self, workers: WorkerGroup, part: BatchRef, *, first: bool) -> Metrics:
        try:
            metrics = await workers.call(TrainWorker.weigh, part)
        except EmptyBatchError:
            if self._config.on_empty == "error":
                raise
            return Metrics.sum({"train/skipped_empty": 1})
        return metrics + await workers.call(TrainWorker.update, part, first)

    def _minibatches(self, batch: BatchRef) -> Iterator[BatchRef]:
        """Of whole groups; a data row without companions is its own group. The order depends on seed, batch and epoch."""
        groups = batch.groups
        if len(groups) < self._config.minibatches:
            raise EmptyBatchError(
                f"{len(groups)} groups cannot fill minibatches={self._config.minibatches}, each of whole groups; use fewer"
            )
        if self._config.minibatches == 1:
            yield from [batch] * self._config.epochs
            return
        for epoch in range(self._config.epochs):
            seed = np.random.Philox([self._seed, groups[0].ordinal, epoch])
            order = np.random.Generator(seed).permutation(len(groups))
            for chosen in np.array_split(order, self._config.minibatches):
                members = {groups[int(i)] for i in chosen}
                yield batch.select([i for i, key in enumerate(batch.keys) if key.group in members])
