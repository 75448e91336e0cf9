"""The workers behind each role's group: one rank of a model, fetching its rows by handle and running its engine on them.

A `ModelWorker` only reads its model: a reference, a teacher. A `TrainWorker` also trains it, for one objective, which is a
row of the algorithm table: the policy, a critic. Methods are called through a WorkerGroup; columns go through the queue.

Legend: N packed tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from torch import Tensor

from tandem import device
from tandem.algos import columns
from tandem.algos.segments import CountedTokens, row_sum
from tandem.checkpoint.rank import RankWeights
from tandem.checkpoint.transport import Outlet
from tandem.data_proto import DataProto
from tandem.durable import beside
from tandem.errors import EmptyBatchError
from tandem.faults import crash_point
from tandem.ports import Collect, Dispatch, Place, TrainEngine, TransferQueue, register
from tandem.trainer.fetch import fetch
from tandem.types import Algorithm, BatchRef, Metric, Metrics
from tandem.weights import OpenedWeights, SentWeights, WeightPart, wire_hash

_PASS = frozenset({"tokens", "mask", "temperature"})


class ModelWorker:
    """One rank of a role that gives columns."""

    def __init__(self, engine: TrainEngine, queue: TransferQueue) -> None:
        self.engine = engine
        self._queue = queue
        self._weights = RankWeights(engine)
        self._writing: Future[None] | None = None

    @register(Dispatch.SPLIT, Collect.SUM)
    async def forward(self, batch: BatchRef, outputs: Mapping[str, str], against: str | None = None, top: int = 0) -> Metrics:
        """Writes what the engine gives in one pass, outputs[column] as `column`.

        against: a column of logprobs to measure the mismatch of this model's to. top: how many of the likeliest tokens.
        """
        crash_point("forward.before")
        rows = await fetch(self._queue, batch, _PASS | ({against} if against else frozenset[str]()))
        found = self.engine.forward(rows, frozenset(outputs.values()), top=top)
        token = {column: found[output] for column, output in outputs.items()}
        await self._queue.write(DataProto.make(rows.keys, rows.lengths, token=token))
        crash_point("forward.after")
        return mismatch(rows[against], found["logprobs"], rows["mask"]) if against else Metrics()

    @register(Dispatch.SPLIT, Collect.CONCAT)
    async def score(self, rows: DataProto) -> DataProto:
        """Of a reward model: row column `scores` (float32 [B]), the value at each row's last masked token.

        The rows come with the call: what is scored is not in the queue yet.
        """
        values_N = self.engine.forward(rows, frozenset({"values"}))["values"]
        last_N = CountedTokens(rows["mask"], rows.lengths).last()
        return DataProto.make(rows.keys, rows.lengths, row={"scores": row_sum(values_N, last_N, rows.lengths)})

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def weights(self) -> WeightPart:
        """See ports.WeightWorker."""
        shards = tuple(self.engine.weight_shards())
        return WeightPart(self.engine.layout(), shards, wire_hash(shards))

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def open_weights(self, outlet: Outlet) -> OpenedWeights | None:
        """See ports.WeightWorker."""
        return self._weights.open(outlet)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def send_weights(self, number: int, delta: bool, whole: bool) -> SentWeights | None:
        """See ports.WeightWorker."""
        crash_point("publish.send")
        return await self._weights.send(number, delta=delta, whole=whole)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def logprobs(self, rows: DataProto) -> DataProto:
        """See ports.WeightWorker."""
        return self.engine.forward(rows, frozenset({"logprobs"}))

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def load_weights(self, path: Path) -> None:
        """The model of a Hugging Face directory, and an optimiser that begins anew."""
        self.engine.load_weights(path)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def save(self, path: Path, copied: bool = False) -> None:
        """Everything that `load` needs to go on bit for bit; it is written when `saved` returns.

        copied: this call returns when that is copied, and a thread writes it, whatever else is called meanwhile.
        """
        if copied:
            self._writing = beside(f"saving to {path}", partial(self.engine.snapshot(), path))
        else:
            self.engine.save(path)

    @register(Dispatch.BROADCAST, Collect.FIRST, beside=True)
    async def saved(self) -> None:
        """Until nothing is being written any more. Raises what went wrong with the last `save`."""
        if self._writing is not None:
            await asyncio.wrap_future(self._writing)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def load(self, path: Path) -> None:
        self.engine.load(path)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def reset_optimizer(self) -> None:
        self.engine.reset_optimizer()

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def place(self, where: Place, weights: bool = True) -> Mapping[str, int]:
        """See ports.TrainEngine."""
        return self.engine.place(where, weights=weights)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def peak_memory(self) -> int:
        """The most bytes that this rank's process has held so far, whatever else is in it."""
        return device.peak_memory_bytes()


class TrainWorker(ModelWorker):
    """One rank of a role that is trained.

    objective: a configured row. role: columns of its optimiser steps are role_loss_weights, ... in the queue; its metrics
    are role/loss, ..., and train/loss, ... where it is the policy. ranks: over how many its engine averages gradients.
    against: a column of logprobs that the first update of a batch measures the mismatch of its own to, where no pass before does.
    """

    def __init__(
        self,
        engine: TrainEngine,
        queue: TransferQueue,
        objective: Algorithm,
        role: str = "policy",
        *,
        ranks: int = 1,
        against: str | None = None,
    ) -> None:
        super().__init__(engine, queue)
        self._objective = objective
        self._against = against
        self._ranks = ranks
        self._loss = columns.loss_ref(objective)
        self._own = {f"{role}_{column}": column for column in columns.step_gives(objective)}
        self._prefix = "train" if role == "policy" else role

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def weigh(self, batch: BatchRef) -> Metrics:
        """Writes the loss weights of these rows, which are one optimiser step. Raises EmptyBatchError where none counts."""
        rows = await fetch(self._queue, batch, columns.step_needs(self._objective))
        found = columns.step_columns(self._objective, {**rows.batch, "lengths": rows.lengths}, ranks=self._ranks)
        if not bool((found["loss_weights"] != 0).any()):
            raise EmptyBatchError(f"every loss weight of the {len(rows)} rows is zero: there is nothing to train on")
        token = {own: found[column] for own, column in self._own.items()}
        await self._queue.write(DataProto.make(rows.keys, rows.lengths, token=token))
        return self._named(Metrics.sum({"train/tokens": int(rows["mask"].sum()), "train/optimizer_steps": 1}))

    @register(Dispatch.SPLIT, Collect.SUM)
    async def update(self, batch: BatchRef, first: bool = True) -> Metrics:
        """One optimiser step on these rows, which have been weighed. first: no other step of their batch was before it."""
        crash_point("update.before")
        rows = await self._weighed(batch)
        metrics, found = self.engine.forward_backward(rows, self._loss)
        crash_point("update.before_step")
        metrics += self.engine.step()
        crash_point("update.after_step")
        return self._named(metrics) + (self._mismatch(rows, found) if first else Metrics())

    @register(Dispatch.SPLIT, Collect.SUM)
    async def evaluate(self, batch: BatchRef) -> Metrics:
        """The objective on these rows, which have been weighed, as eval/...: nothing is trained on."""
        return self.engine.evaluate(await self._weighed(batch), self._loss)

    def _mismatch(self, rows: DataProto, found: DataProto) -> Metrics:
        return mismatch(rows[self._against], found["logprobs"], rows["mask"]) if self._against else Metrics()

    async def _weighed(self, batch: BatchRef) -> DataProto:
        sampled = frozenset({self._against} if self._against else ())
        rows = await fetch(self._queue, batch, self._objective.needs | _PASS | self._own.keys() | sampled)
        return rows.with_columns(token={column: rows[own] for own, column in self._own.items()})

    def _named(self, metrics: Metrics) -> Metrics:
        """An engine calls what it measures train/...; here it gets the name of the role."""
        return Metrics({name.removeprefix("train/"): metric for name, metric in metrics.items()}).prefixed(self._prefix)


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
