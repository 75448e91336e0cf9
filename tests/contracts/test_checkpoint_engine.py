"""The laws of ports.CheckpointEngine, for every transport with every encoding and the fake: after a publish every engine holds the
trainer's weights.

The engines here are stand-ins with real tensors. Where a transport shares storage, the rollouts are built on the trainer's own
parameters, as a run in one process does. Trainers of two ranks hold the rows of each weight between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem import device
from tandem.checkpoint.collective import Collective
from tandem.checkpoint.disk import Disk
from tandem.checkpoint.fake import FakeCheckpoint, FakeWeightWorker, predicted
from tandem.checkpoint.in_place import InPlace
from tandem.checkpoint.publisher import CheckpointConfig, Publisher
from tandem.checkpoint.shared_memory import SharedMemory
from tandem.checkpoint.transport import Transport
from tandem.errors import EngineError
from tandem.ports import CheckpointEngine, Held, Place, RolloutEngine, WeightSource, WeightWorker
from tandem.rollout.weights import room, scatter, wire_hash
from tandem.runtime.inline import InlineGroup
from tandem.types import Chunk, GenerateRequest, Key, PolicyRef
from tandem.weights import WeightBlock, WeightLayout, WeightShard, whole_shards

Weights = dict[str, Tensor]
BUCKET_BYTES = 64  # less than the largest weight
PROBE = ((1, 2, 3), (4, 5))


def update(trainer: FakeWeightWorker) -> None:
    """Some numbers of each weight."""
    for tensor in trainer.held.values():
        tensor.view(-1)[::3].add_(1)


class Rollout:
    """Holds weights, and takes what it is given unless it is told that it reads them already."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self, weights: Weights, *, deaf: bool = False) -> None:
        self.weights = weights
        self.policy = PolicyRef()
        self._deaf = deaf

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        if self._deaf:
            return
        if not source.shared:
            await asyncio.to_thread(self._take, source)
        self.policy = policy

    def _take(self, source: WeightSource) -> None:
        assert sum(block.numel for block in source.blocks) == sum(tensor.numel() for tensor in self.weights.values())
        for piece in source.shards(room(self.weights)):
            scatter(piece, self.weights[piece.block.name])

    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held:
        logprobs = tuple(np.full(len(row) - 1, predicted(self.weights), np.float32) for row in rows)
        return Held(tuple(wire_hash(self.weights, part) for part in blocks), logprobs, 0.0)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise NotImplementedError

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...

    async def abort(self, keys: Collection[Key]) -> None:
        raise NotImplementedError

    async def place(self, where: Place) -> Mapping[str, int]:
        raise NotImplementedError

    async def close(self) -> None: ...


class HalfWorker(FakeWeightWorker):
    """One of two ranks, which holds half of the rows of each weight: an odd one more, and a number alone is the first's."""

    def __init__(self, held: Weights, index: int) -> None:
        super().__init__(held, copies=True)
        self._index = index

    def layout(self) -> WeightLayout:
        return replace(super().layout(), index=self._index)

    def weight_shards(self) -> Iterator[WeightShard]:
        for shard in super().weight_shards():
            if not shard.tensor.ndim:
                if self._index == 0:
                    yield shard
                continue
            middle = (len(shard.tensor) + 1) // 2
            start, end = (0, middle) if self._index == 0 else (middle, len(shard.tensor))
            if end > start:
                yield WeightShard(shard.name, shard.shape, (start, *shard.offsets[1:]), shard.tensor[start:end])


@dataclass(frozen=True)
class Adapter:
    """An adapter under test; shares: its engines stand on the trainer's storage. sends: as what an update goes."""

    make: Callable[[Path], CheckpointEngine]
    shares: bool = False
    delta: bool = False


def collective() -> Collective:
    return Collective("127.0.0.1", device.select("cpu"), BUCKET_BYTES, limit_s=30)


TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "shared_memory": lambda _: SharedMemory(),
    "disk": lambda path: Disk(path, BUCKET_BYTES),
    "collective": lambda _: collective(),
}


def publisher(transport: Transport, encoding: str = "full", **config: object) -> Publisher:
    return Publisher([transport], CheckpointConfig(encoding=encoding, limit_s=30, **config), PROBE)  # type: ignore[arg-type]


def _adapter(name: str, encoding: str) -> Adapter:
    return Adapter(lambda path: publisher(TRANSPORTS[name](path), encoding), delta=encoding != "full")


ADAPTERS = {
    "in_place": Adapter(lambda _: publisher(InPlace()), shares=True),
    **{f"{name} {encoding}": _adapter(name, encoding) for name in TRANSPORTS for encoding in ("full", "delta_sharded")},
    "shared_memory delta": _adapter("shared_memory", "delta"),
    "fake": Adapter(lambda _: FakeCheckpoint()),
}


@pytest.fixture(params=ADAPTERS.values(), ids=ADAPTERS.keys())
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return request.param


@asynccontextmanager
async def open_engine(adapter: Adapter, path: Path) -> AsyncGenerator[CheckpointEngine]:
    async with aclosing(adapter.make(path)) as engine:
        yield engine


def some_weights() -> Weights:
    return {
        "embed": torch.arange(60.0).reshape(20, 3),
        "norm": torch.ones(7, dtype=torch.bfloat16),
        "scale": torch.tensor(2.0),
        "row": torch.arange(3.0)[None],
    }


def zeros(trainer: FakeWeightWorker) -> Weights:
    return {name: torch.zeros_like(tensor) for name, tensor in trainer.held.items()}


def rollouts_of(adapter: Adapter, trainer: FakeWeightWorker, count: int = 2) -> list[Rollout]:
    return [Rollout(trainer.held if adapter.shares else zeros(trainer)) for _ in range(count)]


def assert_equal(weights: Weights, others: Weights) -> None:
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {name: tensor.tolist() for name, tensor in others.items()}


def test_every_engine_holds_the_weights_and_the_policy(adapter: Adapter, tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=not adapter.shares)
        rollouts = rollouts_of(adapter, trainer)
        async with open_engine(adapter, tmp_path) as engine:
            await engine.connect(InlineGroup([trainer]), rollouts)
            assert engine.admitted == ()
            policy = PolicyRef("policy", incarnation=2)
            for number in range(4):
                update(trainer)
                policy = policy.next()
                metrics = await engine.publish(policy)
                assert [rollout.policy for rollout in rollouts] == [policy, policy]
                assert engine.admitted == tuple(rollouts)
                for rollout in rollouts:
                    assert_equal(rollout.weights, trainer.held)
                whole = 60 * 4 + 7 * 2 + 4 + 12
                moved = metrics["publish/bytes"].value
                assert moved == 0 if adapter.shares else moved < whole if adapter.delta and number else moved == whole
                assert metrics["publish/time_s"].value >= 0

    asyncio.run(scenario())


def test_later_updates_of_the_trainer_do_not_leak_unless_storage_is_shared(adapter: Adapter, tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=not adapter.shares)
        (rollout,) = rollouts_of(adapter, trainer, 1)
        async with open_engine(adapter, tmp_path) as engine:
            await engine.connect(InlineGroup([trainer]), [rollout])
            await engine.publish(PolicyRef(version=1))
            published = {name: tensor.clone() for name, tensor in rollout.weights.items()}
            update(trainer)
            assert all(torch.equal(published[name], rollout.weights[name]) for name in published) is not adapter.shares

    asyncio.run(scenario())


def test_no_rollouts_is_fine_and_publishing_first_is_not(adapter: Adapter, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_engine(adapter, tmp_path) as engine:
            with pytest.raises(EngineError, match=r"publishing policy@0\.1 before connect"):
                await engine.publish(PolicyRef(version=1))
            await engine.connect(InlineGroup([FakeWeightWorker(some_weights())]), [])
            await engine.publish(PolicyRef(version=1))

    asyncio.run(scenario())


@pytest.mark.parametrize("encoding", ["full", "delta_sharded"])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_ranks_send_what_each_of_them_holds_and_no_more(name: str, encoding: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        held = some_weights()
        ranks = [HalfWorker(held, index) for index in range(2)]
        rollouts = [Rollout(zeros(ranks[0])) for _ in range(2)]
        async with open_engine(_adapter(name, encoding), tmp_path) as engine:
            await engine.connect(InlineGroup(ranks), rollouts)
            for version in range(1, 4):
                metrics = await engine.publish(PolicyRef(version=version))
                for rollout in rollouts:
                    assert_equal(rollout.weights, held)
                sent = metrics["publish/sent_frac"].value
                assert sent < 0.6 if version > 1 and encoding != "full" else sent == 1
                update(ranks[0])

    asyncio.run(scenario())


def test_the_stand_ins_are_engines() -> None:
    trainer: WeightWorker = FakeWeightWorker(some_weights())
    rollout: RolloutEngine = Rollout({})
    assert [spec.name for spec in asyncio.run(trainer.weights()).layout.specs] == ["embed", "norm", "scale", "row"]
    assert rollout.policy == PolicyRef()
    assert [shard.name for shard in whole_shards(torch.nn.Linear(1, 1))] == ["weight", "bias"]
