from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from tandem.checkpoint.in_place import InPlace
from tandem.checkpoint.wire import wire_hash
from tandem.errors import EngineError
from tandem.ports import WeightShard
from tandem.types import PolicyRef
from tests.contracts.test_checkpoint_engine import Rollout, Trainer, some_weights, whole


class Cut(Trainer):
    def weight_shards(self) -> Iterator[WeightShard]:
        for shard in super().weight_shards():
            yield WeightShard(shard.name, shard.shape, shard.offsets, shard.tensor[:1] if shard.tensor.ndim else shard.tensor)


class Forgetful(Trainer):
    def weight_shards(self) -> Iterator[WeightShard]:
        return (shard for shard in super().weight_shards() if shard.name != "norm")


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (Cut, r"weight embed is cut: a block \(1, 2\) of \(3, 2\); publishing in place needs whole weights"),
        (Forgetful, "not in both: norm$"),
    ],
)
def test_weights_that_are_not_whole_are_refused(trainer: type[Trainer], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        asyncio.run(InPlace().connect(trainer(some_weights()), []))


def test_an_engine_that_did_not_listen_is_an_error() -> None:
    async def scenario() -> None:
        trainer = Trainer(some_weights())
        engine = InPlace()
        await engine.connect(trainer, [Rollout(trainer.weights, deaf=True)])
        await engine.publish(PolicyRef(version=1))

    with pytest.raises(EngineError, match=r"says policy@0\.0 after policy@0\.1 was published to it"):
        asyncio.run(scenario())


def test_says_whether_anything_changed() -> None:
    async def scenario() -> None:
        trainer = Trainer(some_weights())
        engine = InPlace()
        await engine.connect(trainer, [])
        assert engine.wire_hash is None
        assert "publish/changed" not in await engine.publish(PolicyRef(version=1))
        assert (await engine.publish(PolicyRef(version=2)))["publish/changed"].value == 0
        trainer.update()
        assert (await engine.publish(PolicyRef(version=3)))["publish/changed"].value == 1
        assert engine.wire_hash == wire_hash(whole(trainer.weights))

    asyncio.run(scenario())


def test_wire_hash_sees_every_difference_and_nothing_else() -> None:
    base = WeightShard("w", (4, 2), (0, 0), torch.arange(8.0).reshape(4, 2))
    flipped = base.tensor.clone()
    flipped.view(torch.int32)[3, 1] ^= 1
    others = [
        WeightShard("v", base.shape, base.offsets, base.tensor),
        WeightShard("w", (8, 2), base.offsets, base.tensor),
        WeightShard("w", base.shape, (4, 0), base.tensor),
        WeightShard("w", base.shape, base.offsets, base.tensor.reshape(2, 4)),
        WeightShard("w", base.shape, base.offsets, base.tensor.view(torch.int32)),
        WeightShard("w", base.shape, base.offsets, flipped),
        WeightShard("w", base.shape, base.offsets, torch.empty(0, 2)),
    ]
    hashes = {wire_hash([shard]) for shard in [base, *others]}
    assert len(hashes) == 1 + len(others)
    strided = WeightShard("w", base.shape, base.offsets, base.tensor.T.contiguous().T.requires_grad_())
    assert wire_hash([strided]) == wire_hash([base])
    assert wire_hash([base, others[0]]) != wire_hash([others[0], base])
