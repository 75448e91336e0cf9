"""Publishing without moving anything: trainer and rollout engines read the same parameters in one process.

What is left to do is to tell the engines that the weights are new, so that they drop what older ones computed. The
hash that is computed meanwhile shows whether an update changed anything, and names the weights in summaries.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.checkpoint.wire import wire_hash
from tandem.errors import EngineError
from tandem.ports import RolloutEngine, TrainEngine, WeightShard
from tandem.types import Metrics, PolicyRef


@dataclass(frozen=True, slots=True)
class InPlaceConfig:
    """verify: hash the weights at each publish (23 ms for 500 MB)."""

    verify: bool = True


@dataclass(frozen=True, slots=True)
class _SharedWeights:
    """The trainer's own parameters as a WeightSource."""

    train: TrainEngine

    @property
    def shared(self) -> bool:
        return True

    def shards(self) -> Iterator[WeightShard]:
        return self.train.weight_shards()


class InPlace:
    """Implements ports.CheckpointEngine for engines that share their parameters with the trainer."""

    def __init__(self, config: InPlaceConfig | None = None) -> None:
        self._config = config or InPlaceConfig()
        self._train: TrainEngine | None = None
        self._rollouts: tuple[RolloutEngine, ...] = ()
        self.wire_hash: str | None = None
        """Of the weights published last; None before, and without `verify`."""

    async def connect(self, train: TrainEngine, rollouts: Sequence[RolloutEngine]) -> None:
        """Raises EngineError where the trainer cuts its weights, or gives others than its layout says."""
        expected = {spec.name: spec.shape for spec in train.layout().specs if spec.tied_to is None}
        given = {shard.name: shard for shard in train.weight_shards()}
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
        """Metrics: publish/bytes (0), publish/time_s and, with `verify`, publish/changed (0 or 1, from the second time on)."""
        if self._train is None:
            raise EngineError(f"publishing {policy} before connect(train, rollouts)")
        start = time.perf_counter()
        source = _SharedWeights(self._train)
        for rollout in self._rollouts:
            await rollout.load_weights(source, policy)
            if rollout.policy != policy:
                raise EngineError(f"a rollout engine says {rollout.policy} after {policy} was published to it")
        metrics = Metrics()
        if self._config.verify:
            before, self.wire_hash = self.wire_hash, wire_hash(source.shards())
            if before is not None:
                metrics += Metrics.mean({"publish/changed": float(self.wire_hash != before)})
        return metrics + Metrics.sum({"publish/bytes": 0, "publish/time_s": time.perf_counter() - start})
