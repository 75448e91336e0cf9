from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.checkpoint.fake import FakeWeightWorker
from tandem.checkpoint.in_place import InPlace
from tandem.checkpoint.wire import wire_hash
from tandem.data_proto import DataProto
from tandem.errors import EngineError
from tandem.models.decoder import DecoderConfig, init_decoder
from tandem.queue.fake import FakeQueue
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.runtime.inline import InlineGroup
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.workers import ModelWorker
from tandem.types import GenerateRequest, Key, LossRef, PolicyRef, Sample, SamplingParams
from tandem.weights import WeightShard
from tests.contracts.test_checkpoint_engine import Rollout, some_weights, update, whole


class Cut(FakeWeightWorker):
    def shards(self) -> tuple[WeightShard, ...]:
        return tuple(replace(shard, tensor=shard.tensor[:1] if shard.tensor.ndim else shard.tensor) for shard in super().shards())


class Forgetful(FakeWeightWorker):
    def shards(self) -> tuple[WeightShard, ...]:
        return tuple(shard for shard in super().shards() if shard.name != "norm")


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (Cut, r"weight embed is cut: a block \(1, 2\) of \(3, 2\); publishing in place needs whole weights"),
        (Forgetful, "not in both: norm$"),
    ],
)
def test_weights_that_are_not_whole_are_refused(trainer: type[FakeWeightWorker], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        asyncio.run(InPlace().connect(InlineGroup([trainer(some_weights())]), []))


def test_an_engine_that_did_not_listen_is_an_error() -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights())
        engine = InPlace()
        await engine.connect(InlineGroup([trainer]), [Rollout(trainer.held, deaf=True)])
        await engine.publish(PolicyRef(version=1))

    with pytest.raises(EngineError, match=r"says policy@0\.0 after policy@0\.1 was published to it"):
        asyncio.run(scenario())


def test_says_whether_anything_changed() -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights())
        engine = InPlace()
        await engine.connect(InlineGroup([trainer]), [])
        assert engine.wire_hash is None
        assert "publish/changed" not in await engine.publish(PolicyRef(version=1))
        assert (await engine.publish(PolicyRef(version=2)))["publish/changed"].value == 0
        update(trainer)
        assert (await engine.publish(PolicyRef(version=3)))["publish/changed"].value == 1
        assert engine.wire_hash == wire_hash(whole(trainer.held))

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


@pytest.mark.parametrize("tied", [True, False])
def test_real_engines_agree_after_every_update(tied: bool) -> None:
    """The probe of law 8: under the weights just published, a sample's logprobs are the trainer's, bit for bit."""
    config = DecoderConfig(17, 16, 32, 1, 2, 1, 8, tie_embeddings=tied, max_positions=64)
    decoder = init_decoder(config, seed=3)
    trainer = TorchEngine(decoder, TrainConfig(lr=0.05))
    rollout = NativeEngine(decoder, str, NativeConfig(slots=4, max_context=64), exact=True)

    async def sample(policy: PolicyRef) -> Sample:
        request = GenerateRequest(Key("probe", policy.version), (1, 2, 3), SamplingParams(max_tokens=12), seed=0)
        chunks = [chunk async for chunk in rollout.generate(request)]
        assert {chunk.policy for chunk in chunks} == {policy}
        tokens = np.array([*request.tokens, *(token for chunk in chunks for token in chunk.tokens)])
        logprobs = np.array([0.0, 0.0, 0.0, *(value for chunk in chunks for value in chunk.logprobs)], np.float32)
        return Sample(request.key, tokens, np.arange(15) >= 3, logprobs, ((policy, 12),), "length")

    async def scenario() -> None:
        engine, policy = InPlace(), PolicyRef()
        await engine.connect(InlineGroup([ModelWorker(trainer, FakeQueue())]), [rollout])
        hashes: set[str | None] = set()
        for _ in range(3):
            policy = policy.next()
            await engine.publish(policy)
            hashes.add(engine.wire_hash)
            rows = DataProto.from_samples([await sample(policy)])
            given = trainer.forward(rows, frozenset({"logprobs"}))["logprobs"]
            assert torch.equal(given, rows["rollout_logprobs"])
            weights = {"loss_weights": rows["mask"].float()}
            trainer.forward_backward(rows.with_columns(token=weights), LossRef("nll"))
            trainer.step()
        assert len(hashes) == 3
        await rollout.close()

    asyncio.run(scenario())
