"""A CheckpointEngine for tests: hands each engine a copy of the trainer's weights, and remembers what it published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.errors import EngineError
from tandem.ports import RolloutEngine, TrainEngine, WeightShard
from tandem.types import Metrics, PolicyRef


@dataclass(frozen=True, slots=True)
class _CopiedWeights:
    held: tuple[WeightShard, ...]

    @property
    def shared(self) -> bool:
        return False

    def shards(self) -> Iterator[WeightShard]:
        return iter(self.held)


class FakeCheckpoint:
    """Implements ports.CheckpointEngine; `published` lists the policies in order."""

    def __init__(self) -> None:
        self.published: list[PolicyRef] = []
        self._train: TrainEngine | None = None
        self._rollouts: tuple[RolloutEngine, ...] = ()

    async def connect(self, train: TrainEngine, rollouts: Sequence[RolloutEngine]) -> None:
        self._train, self._rollouts = train, tuple(rollouts)

    async def publish(self, policy: PolicyRef) -> Metrics:
        if self._train is None:
            raise EngineError(f"publishing {policy} before connect(train, rollouts)")
        copies = tuple(replace(shard, tensor=shard.tensor.detach().clone()) for shard in self._train.weight_shards())
        for rollout in self._rollouts:
            await rollout.load_weights(_CopiedWeights(copies), policy)
        self.published.append(policy)
        moved = sum(shard.tensor.nbytes for shard in copies) * len(self._rollouts)
        return Metrics.sum({"publish/bytes": moved, "publish/time_s": 0.0})
