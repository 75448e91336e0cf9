"""For tests: a CheckpointEngine that hands each engine a copy of the trainer's weights, and a worker that has such weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.checkpoint.rank import RankWeights
from tandem.checkpoint.transport import Outlet
from tandem.data_proto import DataProto
from tandem.errors import EngineError
from tandem.ports import Collect, Dispatch, RolloutEngine, WeightWorker, WorkerGroup, register
from tandem.types import Metrics, PolicyRef
from tandem.weights import (
    OpenedWeights,
    Room,
    SentWeights,
    WeightBlock,
    WeightLayout,
    WeightPart,
    WeightShard,
    WeightSpec,
    nowhere,
    wire_hash,
)


@dataclass(frozen=True, slots=True)
class _CopiedWeights:
    held: tuple[WeightShard, ...]

    @property
    def shared(self) -> bool:
        return False

    @property
    def blocks(self) -> tuple[WeightBlock, ...]:
        return tuple(shard.block for shard in self.held)

    def shards(self, room: Room = nowhere) -> Iterator[WeightShard]:
        del room
        return iter(self.held)


class FakeCheckpoint:
    """Implements ports.CheckpointEngine; `published` lists the policies in order."""

    def __init__(self) -> None:
        self.published: list[PolicyRef] = []
        self._train: WorkerGroup | None = None
        self._rollouts: tuple[RolloutEngine, ...] = ()

    @property
    def admitted(self) -> tuple[RolloutEngine, ...]:
        return self._rollouts if self.published else ()

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
        moved = sum(shard.tensor.nbytes for shard in copies)
        return Metrics.sum({"publish/bytes": moved, "publish/time_s": 0.0})

    async def aclose(self) -> None: ...


class FakeWeightWorker:
    """Implements ports.WeightWorker, and what it asks of an engine, with weights by name. copies: it is in another process, as far
    as others can see.

    Its logprobs are minus the sum of all weights, which stand-ins of engines can tell too.
    """

    def __init__(self, held: dict[str, Tensor], *, copies: bool = False) -> None:
        self.held = held
        self._copies = copies
        self._weights = RankWeights(self)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def weights(self) -> WeightPart:
        shards = tuple(self.weight_shards())
        given = tuple(replace(shard, tensor=shard.tensor.clone()) for shard in shards) if self._copies else shards
        return WeightPart(self.layout(), given, wire_hash(shards))

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def open_weights(self, outlet: Outlet) -> OpenedWeights | None:
        return self._weights.open(outlet)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def send_weights(self, number: int, delta: bool, whole: bool) -> SentWeights | None:
        return await self._weights.send(number, delta=delta, whole=whole)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def logprobs(self, rows: DataProto) -> DataProto:
        total = predicted(self.held)
        return DataProto.make(rows.keys, rows.lengths, token={"logprobs": torch.full((rows.num_tokens,), total)})

    def layout(self) -> WeightLayout:
        return WeightLayout(tuple(WeightSpec(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self.held.items()))

    def weight_shards(self) -> Iterator[WeightShard]:
        for name, tensor in self.held.items():
            yield WeightShard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def predicted(weights: dict[str, Tensor]) -> float:
    """What a model of these weights says of any token, as far as the fakes know."""
    return -float(sum(tensor.double().sum() for tensor in weights.values()))
