"""For tests: a CheckpointEngine that hands each engine a copy of the trainer's weights, and a worker that has such weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tandem.checkpoint.wire import wire_hash
from tandem.errors import EngineError
from tandem.ports import Collect, Dispatch, RolloutEngine, WeightWorker, WorkerGroup, register
from tandem.types import Metrics, PolicyRef
from tandem.weights import WeightLayout, WeightPart, WeightShard, WeightSpec


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
        self._train: WorkerGroup | None = None
        self._rollouts: tuple[RolloutEngine, ...] = ()

    async def connect(self, train: WorkerGroup, rollouts: Sequence[RolloutEngine]) -> None:
        self._train, self._rollouts = train, tuple(rollouts)

    async def publish(self, policy: PolicyRef) -> Metrics:
        if self._train is None:
            raise EngineError(f"publishing {policy} before connect(train, rollouts)")
        parts = await self._train.call_each(WeightWorker.weights)
        copies = tuple(replace(shard, tensor=shard.tensor.detach().clone()) for part in parts for shard in part.shards)
        for rollout in self._rollouts:
            await rollout.load_weights(_CopiedWeights(copies), policy)
        self.published.append(policy)
        moved = sum(shard.tensor.nbytes for shard in copies) * len(self._rollouts)
        return Metrics.sum({"publish/bytes": moved, "publish/time_s": 0.0})


class FakeWeightWorker:
    """Implements ports.WeightWorker with whole weights by name. copies: it is in another process, as far as others can see."""

    def __init__(self, held: dict[str, Tensor], *, copies: bool = False) -> None:
        self.held = held
        self._copies = copies

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def weights(self) -> WeightPart:
        specs = tuple(WeightSpec(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self.held.items())
        shards = self.shards()
        given = tuple(replace(shard, tensor=shard.tensor.clone()) for shard in shards) if self._copies else shards
        return WeightPart(WeightLayout(specs), given, wire_hash(shards))

    def shards(self) -> tuple[WeightShard, ...]:
        return tuple(WeightShard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor) for name, tensor in self.held.items())
