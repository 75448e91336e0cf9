"""Publishing by copies: every rank of the trainer gives what it holds, and each rollout engine takes it into weights of its own.

The parts pass through this process, whole, and over whatever carries the results of a WorkerGroup's calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.checkpoint.wire import wire_hash
from tandem.errors import EngineError
from tandem.ports import RolloutEngine, WeightWorker, WorkerGroup
from tandem.types import Metrics, PolicyRef
from tandem.weights import WeightShard


@dataclass(frozen=True, slots=True)
class GatheredWeights:
    """Implements ports.WeightSource with the parts of all ranks. wire_hashes: of the parts, on which both ends agree."""

    parts: tuple[WeightShard, ...]
    wire_hashes: tuple[str, ...]

    @property
    def shared(self) -> bool:
        return False

    def shards(self) -> Iterator[WeightShard]:
        return iter(self.parts)


async def gather(train: WorkerGroup) -> GatheredWeights:
    """One copy of the model that the ranks hold. Raises EngineError for a part that is not what its rank sent."""
    parts = [part for part in await train.call_each(WeightWorker.weights) if part.layout.replica == 0]
    for index, part in enumerate(parts):
        if (here := wire_hash(part.shards)) != part.wire_hash:
            raise EngineError(f"the weights of rank {index} have hash {part.wire_hash} there and {here} here: they came damaged")
    return GatheredWeights(tuple(shard for part in parts for shard in part.shards), tuple(part.wire_hash for part in parts))


class Gathered:
    """Implements ports.CheckpointEngine for engines with weights of their own."""

    def __init__(self) -> None:
        self._train: WorkerGroup | None = None
        self._rollouts: tuple[RolloutEngine, ...] = ()
        self._published: tuple[str, ...] | None = None  # its wire hashes

    async def connect(self, train: WorkerGroup, rollouts: Sequence[RolloutEngine]) -> None:
        self._train, self._rollouts = train, tuple(rollouts)

    async def publish(self, policy: PolicyRef) -> Metrics:
        """Metrics: publish/bytes, publish/time_s and, from the second time on, publish/changed (0 or 1). Without engines nothing
        is gathered.
        """
        if self._train is None:
            raise EngineError(f"publishing {policy} before connect(train, rollouts)")
        start, moved, metrics = time.perf_counter(), 0, Metrics()
        if self._rollouts:
            source = await gather(self._train)
            for rollout in self._rollouts:
                await rollout.load_weights(source, policy)
                if rollout.policy != policy:
                    raise EngineError(f"a rollout engine says {rollout.policy} after {policy} was published to it")
            moved = len(self._rollouts) * sum(shard.tensor.nbytes for shard in source.parts)
            if self._published is not None:
                metrics += Metrics.mean({"publish/changed": float(self._published != source.wire_hashes)})
            self._published = source.wire_hashes
        return metrics + Metrics.sum({"publish/bytes": moved, "publish/time_s": time.perf_counter() - start})
