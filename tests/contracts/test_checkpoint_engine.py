"""The laws of ports.CheckpointEngine, for every adapter and the fake: after a publish every engine holds the trainer's weights.

The engines here are stand-ins with real tensors. Where an adapter shares storage, the rollouts are built on the
trainer's own parameters, as a run in one process does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tandem.checkpoint.fake import FakeCheckpoint, FakeWeightWorker
from tandem.checkpoint.gathered import Gathered
from tandem.checkpoint.in_place import InPlace
from tandem.checkpoint.wire import wire_hash
from tandem.errors import EngineError
from tandem.ports import CheckpointEngine, Place, RolloutEngine, WeightSource, WeightWorker
from tandem.runtime.inline import InlineGroup
from tandem.types import Chunk, GenerateRequest, Key, PolicyRef
from tandem.weights import WeightShard

Weights = dict[str, Tensor]


def whole(weights: Weights) -> Iterator[WeightShard]:
    for name, tensor in weights.items():
        yield WeightShard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def update(trainer: FakeWeightWorker) -> None:
    for tensor in trainer.held.values():
        tensor.add_(1)


class Rollout:
    """Holds weights, and copies what it is given unless it is told that it reads them already."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self, weights: Weights, *, deaf: bool = False) -> None:
        self.weights = weights
        self.policy = PolicyRef()
        self._deaf = deaf

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        if self._deaf:
            return
        if not source.shared:
            for shard in source.shards():
                self.weights[shard.name].copy_(shard.tensor)
        self.policy = policy

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        raise NotImplementedError

    async def pause(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def abort(self, keys: Collection[Key]) -> None:
        raise NotImplementedError

    async def place(self, where: Place) -> None:
        raise NotImplementedError

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Adapter:
    """An adapter under test; shares: its engines stand on the trainer's storage."""

    make: Callable[[], CheckpointEngine]
    shares: bool


ADAPTERS = {
    "in_place": Adapter(InPlace, shares=True),
    "gathered": Adapter(Gathered, shares=False),
    "fake": Adapter(FakeCheckpoint, shares=False),
}


@pytest.fixture(params=ADAPTERS.values(), ids=ADAPTERS.keys())
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return request.param


def some_weights() -> Weights:
    return {"embed": torch.arange(6.0).reshape(3, 2), "norm": torch.ones(2, dtype=torch.bfloat16), "scale": torch.tensor(2.0)}


def rollouts_of(adapter: Adapter, trainer: FakeWeightWorker, count: int = 2) -> list[Rollout]:
    if adapter.shares:
        return [Rollout(trainer.held) for _ in range(count)]
    return [Rollout({name: torch.zeros_like(tensor) for name, tensor in trainer.held.items()}) for _ in range(count)]


def test_every_engine_holds_the_weights_and_the_policy(adapter: Adapter) -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=not adapter.shares)
        rollouts = rollouts_of(adapter, trainer)
        engine: CheckpointEngine = adapter.make()
        await engine.connect(InlineGroup([trainer]), rollouts)
        policy = PolicyRef("policy", incarnation=2)
        for _ in range(3):
            update(trainer)
            policy = policy.next()
            metrics = await engine.publish(policy)
            assert [rollout.policy for rollout in rollouts] == [policy, policy]
            assert {wire_hash(whole(rollout.weights)) for rollout in rollouts} == {wire_hash(whole(trainer.held))}
            moved = 0 if adapter.shares else 2 * (24 + 4 + 4)
            assert metrics["publish/bytes"].value == moved
            assert metrics["publish/time_s"].value >= 0

    asyncio.run(scenario())


def test_later_updates_of_the_trainer_do_not_leak_unless_storage_is_shared(adapter: Adapter) -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=not adapter.shares)
        (rollout,) = rollouts_of(adapter, trainer, 1)
        engine = adapter.make()
        await engine.connect(InlineGroup([trainer]), [rollout])
        await engine.publish(PolicyRef(version=1))
        published = wire_hash(whole(rollout.weights))
        update(trainer)
        assert (wire_hash(whole(rollout.weights)) == published) is not adapter.shares

    asyncio.run(scenario())


def test_no_rollouts_is_fine_and_publishing_first_is_not(adapter: Adapter) -> None:
    async def scenario() -> None:
        engine = adapter.make()
        with pytest.raises(EngineError, match=r"publishing policy@0\.1 before connect"):
            await engine.publish(PolicyRef(version=1))
        await engine.connect(InlineGroup([FakeWeightWorker(some_weights())]), [])
        await engine.publish(PolicyRef(version=1))

    asyncio.run(scenario())


def test_the_stand_ins_are_engines() -> None:
    trainer: WeightWorker = FakeWeightWorker(some_weights())
    rollout: RolloutEngine = Rollout({})
    assert [spec.name for spec in asyncio.run(trainer.weights()).layout.specs] == ["embed", "norm", "scale"]
    assert rollout.policy == PolicyRef()
