"""Publishing without moving anything: trainer and rollout engines read the same parameters in one process.

What is left to do is to tell the engines that the weights are new, so that they drop what older ones computed. The
hash that is computed meanwhile (23 ms for 500 MB) shows whether an update changed anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.errors import EngineError
from tandem.ports import RolloutEngine, WeightWorker, WorkerGroup
from tandem.types import Metrics, PolicyRef
from tandem.weights import WeightPart, WeightShard


@dataclass(frozen=True, slots=True)
class _SharedWeights:
    """The trainer's own parameters as a WeightSource."""

    part: WeightPart

    @property
    def shared(self) -> bool:
        return True

    def shards(self) -> Iterator[WeightShard]:
        return iter(self.part.shards)


class InPlace:
    """Implements ports.CheckpointEngine for engines that share their parameters with the trainer, a worker of this process."""

    def __init__(self) -> None:
        self._train: WorkerGroup | None = None
        self._rollouts: tuple[RolloutEngine, ...] = ()
        self.wire_hash: str | None = None
        """Of the weights published last; None before."""

    async def connect(self, train: WorkerGroup, rollouts: Sequence[RolloutEngine]) -> None:
        """Raises EngineError where the trainer cuts its weights, or gives others than its layout says."""
        part, *others = await train.call_each(WeightWorker.weights)
        if others:
            raise EngineError(f"{1 + len(others)} ranks hold the weights; publishing in place needs one, in this process")
        expected = {spec.name: spec.shape for spec in part.layout.specs if spec.tied_to is None}
        given = {shard.name: shard for shard in part.shards}
        if odd := sorted(expected.keys() ^ given.keys()):
            raise EngineError(f"weights in the trainer's layout or among its shards, but not in both: {', '.join(odd)}")
        for name, shape in expected.items():
            if tuple(given[name].tensor.shape) != tuple(shape):
                raise EngineError(
                    f"weight {name} is cut: a block {tuple(given[name].tensor.shape)} of {tuple(shape)}; "
                    "publishing in place needs whole weights in one process"
                )
        self._train, self._rollouts = train, tuple(rollouts)

    async def publish(self, policy: PolicyRef) -> Metrics:
        """Metrics: publish/bytes (0), publish/time_s and, from the second time on, publish/changed (0 or 1)."""
        if self._train is None:
            raise EngineError(f"publishing {policy} before connect(train, rollouts)")
        start = time.perf_counter()
        part = await self._train.call(WeightWorker.weights)
        for rollout in self._rollouts:
            await rollout.load_weights(_SharedWeights(part), policy)
            if rollout.policy != policy:
                raise EngineError(f"a rollout engine says {rollout.policy} after {policy} was published to it")
        metrics = Metrics()
        before, self.wire_hash = self.wire_hash, part.wire_hash
        if before is not None:
            metrics += Metrics.mean({"publish/changed": float(self.wire_hash != before)})
        return metrics + Metrics.sum({"publish/bytes": 0, "publish/time_s": time.perf_counter() - start})
