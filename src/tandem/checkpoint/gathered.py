"""The weights that the ranks of a trainer hold, whole and in full precision, in this process: for whoever saves or copies a model.

The parts come over whatever carries the results of a WorkerGroup's calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.errors import EngineError
from tandem.ports import WeightWorker, WorkerGroup
from tandem.weights import Room, WeightBlock, WeightShard, nowhere, wire_hash


@dataclass(frozen=True, slots=True)
class GatheredWeights:
    """Implements ports.WeightSource with the parts of all ranks."""

    parts: tuple[WeightShard, ...]

    @property
    def shared(self) -> bool:
        return False

    @property
    def blocks(self) -> tuple[WeightBlock, ...]:
        return tuple(part.block for part in self.parts)

    def shards(self, room: Room = nowhere) -> Iterator[WeightShard]:
        del room
        return iter(self.parts)


async def gather(train: WorkerGroup) -> GatheredWeights:
    """One copy of the model that the ranks hold. Raises EngineError for a part that is not what its rank sent."""
    parts = [part for part in await train.call_each(WeightWorker.weights) if part.layout.replica == 0]
    for index, part in enumerate(parts):
        if (here := wire_hash(part.shards)) != part.wire_hash:
            raise EngineError(f"the weights of rank {index} have hash {part.wire_hash} there and {here} here: they came damaged")
    return GatheredWeights(tuple(shard for part in parts for shard in part.shards))
