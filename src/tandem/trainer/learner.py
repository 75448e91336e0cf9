"""The update: mini-batches and epochs over one batch. The learner holds handles, its workers hold the model.

Denominators belong to an optimiser step: each mini-batch is weighed as a whole (`PolicyWorker.weigh` writes column
`loss_weights`) before the group splits it over its ranks.

Legend: N packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from tandem.algos import columns
from tandem.data_proto import DataProto
from tandem.errors import EmptyBatchError
from tandem.faults import crash_point
from tandem.ports import Collect, Dispatch, TrainEngine, TransferQueue, WorkerGroup, register
from tandem.types import Algorithm, BatchRef, Metric, Metrics, Unit

_PASS = frozenset({"tokens", "mask", "temperature"})


class PolicyWorker:
    """One rank of the policy: fetches its rows by handle and runs its engine on them. Methods are called through a group."""

    def __init__(self, engine: TrainEngine, queue: TransferQueue, algorithm: Algorithm) -> None:
        self.engine = engine
        self._queue = queue
        self._algorithm = algorithm
        self._loss = columns.loss_ref(algorithm)

    @register(Dispatch.SPLIT, Collect.SUM)
    async def forward(self, batch: BatchRef, column: str, against: str | None = None) -> Metrics:
        """Writes this model's logprobs as `column`. against: a column of logprobs to measure the mismatch to."""
        rows = await self._queue.get(batch.keys, _PASS | ({against} if against else frozenset[str]()))
        logprobs_N = self.engine.forward(rows, frozenset({"logprobs"}))["logprobs"]
        await self._queue.write(DataProto.make(rows.keys, rows.lengths, token={column: logprobs_N}))
        return mismatch(rows[against], logprobs_N, rows["mask"]) if against else Metrics()

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def weigh(self, batch: BatchRef) -> Metrics:
        """Writes `loss_weights` for these rows, which are one optimiser step. Raises EmptyBatchError where none counts."""
        rows = await self._queue.get(batch.keys, columns.step_needs(self._algorithm))
        found = columns.step_columns(self._algorithm, {**rows.batch, "lengths": rows.lengths})
        if not bool((found["loss_weights"] != 0).any()):
            raise EmptyBatchError(f"every loss weight of the {len(rows)} rows is zero: there is nothing to train on")
        await self._queue.write(DataProto.make(rows.keys, rows.lengths, token=found))
        return Metrics.sum({"train/tokens": int(rows["mask"].sum())})

    @register(Dispatch.SPLIT, Collect.SUM)
    async def update(self, batch: BatchRef) -> Metrics:
        """One optimiser step on these rows."""
        rows = await self._queue.get(batch.keys, self._algorithm.needs | _PASS | columns.step_gives(self._algorithm))
        metrics, _ = self.engine.forward_backward(rows, self._loss)
        crash_point("update.before_step")
        metrics += self.engine.step()
        crash_point("update.after_step")
        return metrics


def mismatch(sampled_N: Tensor, trained_N: Tensor, mask_N: Tensor) -> Metrics:
    """How the sampler's logprobs differ from the trainer's on masked tokens: 0, 0, 0, 0 and 1 where they agree.

    With w = exp(trained - sampled): k1 = -log w and k3 = w - 1 - log w estimate KL(sampler | trainer); the effective
    sample size is (sum w)^2 / (n sum w^2).
    """
    gap = (sampled_N - trained_N)[mask_N].double()  # -log w
    if not len(gap):
        return Metrics()
    w, n = (-gap).exp(), float(len(gap))
    means = {"k1": gap.mean(), "k3": (w - 1 + gap).mean(), "ess": w.sum() ** 2 / (n * (w**2).sum())}
    return (
        Metrics.mean({name: value.item() for name, value in means.items()}, n)
        + Metrics({"max": Metric(gap.abs().max().item(), n, "max"), "tokens": Metric(float((gap != 0).sum()), n, "sum")})
    ).prefixed("mismatch")


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


class PolicyLearner:
    """Implements ports.Learner over a WorkerGroup of PolicyWorkers. It has no state of its own."""

    def __init__(self, workers: WorkerGroup, config: LearnerConfig, *, seed: int, unit: Unit = "row") -> None:
        """unit: what stays together where a mini-batch is split over ranks."""
        self._workers = workers
        self._config = config
        self._seed = seed
        self._unit: Unit = unit

    async def update(self, batch: BatchRef) -> Metrics:
        metrics = Metrics()
        for part in self._minibatches(replace(batch, unit=self._unit)):
            try:
                metrics += await self._workers.call(PolicyWorker.weigh, part)
            except EmptyBatchError:
                if self._config.on_empty == "error":
                    raise
                metrics += Metrics.sum({"train/skipped_empty": 1})
                continue
            metrics += await self._workers.call(PolicyWorker.update, part)
            metrics += Metrics.sum({"train/optimizer_steps": 1})
        return metrics

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
