"""Law 8: after a publish both ends agree on the weights' hash and on what they predict; nothing older is used or trained on.

The trainer is a worker whose parts are copies, as from another process; the engine has weights of its own. The second half is
whose samples may be trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.checkpoint import gathered
from tandem.checkpoint.gathered import Gathered, GatheredWeights
from tandem.checkpoint.wire import whole_shards, wire_hash
from tandem.data_proto import DataProto
from tandem.errors import StalenessError
from tandem.models.decoder import DecoderConfig, init_decoder
from tandem.models.lora import add_lora
from tandem.ports import Consumer, Lease
from tandem.queue.fake import FakeQueue
from tandem.rollout import native
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.runtime.inline import InlineGroup
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.intake import Intake
from tandem.trainer.schedule import schedule
from tandem.trainer.workers import ModelWorker
from tandem.types import GenerateRequest, GroupKey, Key, LossRef, PolicyRef, Sample, SamplingParams
from tandem.weights import WeightPart, WeightShard
from tests.laws.breaking import Breaker
from tests.train.rows import LORA

CONFIG = DecoderConfig(17, 16, 32, 1, 2, 1, 8, max_positions=64)


class Elsewhere(ModelWorker):
    """Gives copies, as another process does."""

    async def weights(self) -> WeightPart:
        part = await super().weights()
        return replace(part, shards=tuple(replace(shard, tensor=shard.tensor.clone()) for shard in part.shards))


async def sample(engine: NativeEngine, policy: PolicyRef) -> Sample:
    request = GenerateRequest(Key("probe", policy.version), (1, 2, 3), SamplingParams(max_tokens=12), seed=0)
    chunks = [chunk async for chunk in engine.generate(request)]
    assert {chunk.policy for chunk in chunks} == {policy}, "what was sampled is marked with another policy"
    tokens = np.array([*request.tokens, *(token for chunk in chunks for token in chunk.tokens)])
    logprobs = np.array([0.0, 0.0, 0.0, *(value for chunk in chunks for value in chunk.logprobs)], np.float32)
    return Sample(request.key, tokens, np.arange(15) >= 3, logprobs, ((policy, 12),), "length")


def check_both_ends_agree(*, tied: bool = True, adapter: bool = False) -> None:
    """Three updates, each published; before every publish the engine still holds what was published last."""

    async def scenario() -> None:
        decoder, copy = (init_decoder(replace(CONFIG, tie_embeddings=tied), 3) for _ in range(2))
        for model in (decoder, copy) if adapter else ():
            add_lora(model, LORA, 0)
        trainer = TorchEngine(decoder, TrainConfig(lr=0.05))
        rollout = NativeEngine(copy, str, NativeConfig(slots=4, max_context=64), exact=True)
        checkpoint, policy, seen = Gathered(), PolicyRef(), set[str]()
        await checkpoint.connect(InlineGroup([Elsewhere(trainer, FakeQueue())]), [rollout])
        for _ in range(3):
            policy = policy.next()
            await checkpoint.publish(policy)
            mine = wire_hash(shard for shard in whole_shards(copy) if not adapter or "lora_" in shard.name)
            assert mine == wire_hash(trainer.weight_shards()), "the engine holds other bits"
            seen.add(mine)
            rows = DataProto.from_samples([await sample(rollout, policy)])
            given = trainer.forward(rows, frozenset({"logprobs"}))["logprobs"]
            assert torch.equal(given, rows["rollout_logprobs"]), "the engine predicts something else"
            trainer.forward_backward(rows.with_columns(token={"loss_weights": rows["mask"].float()}), LossRef("nll"))
            trainer.step()
        assert len(seen) == 3, "an update changed nothing"
        await rollout.close()

    asyncio.run(scenario())


def check_nothing_too_old_is_trained_on() -> None:
    """A batch of age 2 where 1 is allowed, as a queue would offer it that nobody guards."""

    class Queue(FakeQueue):
        async def take(self, consumer: Consumer, columns: frozenset[str], n: int, **how: Any) -> Lease:
            lease = await super().take(consumer, columns, n, **how)
            return replace(lease, ref=replace(lease.ref, policies=(PolicyRef(version=age),)))

    async def refused(version: int) -> str:
        queue = Queue()
        await queue.reserve(GroupKey("train", 0), 1)
        tokens, mask = torch.tensor([1, 2]), torch.tensor([False, True])
        await queue.put(DataProto.make([Key("train", 0)], [2], token={"tokens": tokens, "mask": mask}))
        try:
            await Intake(queue, "train", 1, schedule("colocate_async"), PolicyRef(version=version)).take()
        except StalenessError as error:
            return str(error)
        return ""

    age = 4
    assert asyncio.run(refused(5)) == ""
    assert "policy@0.4 and would be trained on by policy@0.6" in asyncio.run(refused(6))


@pytest.mark.parametrize(("tied", "adapter"), [(True, False), (False, False), (True, True)], ids=["tied", "untied", "adapter"])
def test_both_ends_agree(tied: bool, adapter: bool) -> None:
    check_both_ends_agree(tied=tied, adapter=adapter)


def test_nothing_too_old_is_trained_on() -> None:
    check_nothing_too_old_is_trained_on()


# ---------------------------------------------------------------------------------------------------- breakers

_gather, _copy, _load = gathered.gather, native.copy_shards, NativeEngine.load_weights
_first: list[GatheredWeights] = []


async def _what_was_published_first(train: Any) -> GatheredWeights:
    _first.append(await _gather(train))
    return _first[0]


def _all_but_the_last(module: Any, shards: Sequence[WeightShard]) -> None:
    shards = list(shards)
    kept = [shard for shard in whole_shards(module) if shard.name == shards[-1].name]
    _copy(module, [*shards[:-1], *kept])


async def _without_its_name(self: NativeEngine, source: Any, policy: PolicyRef) -> None:
    await _load(self, source, policy)
    self._policy = PolicyRef(version=policy.version - 1)


async def _unasked(self: Intake) -> Lease:
    return await self._queue.take(Consumer("learner"), frozenset({"tokens", "mask"}), 1)


BREAKERS = [
    Breaker(8, "old-weights-again", "tandem.checkpoint.gathered:gather", _what_was_published_first, check_both_ends_agree),
    Breaker(8, "a-weight-left-out", "tandem.rollout.native:copy_shards", _all_but_the_last, check_both_ends_agree),
    Breaker(8, "another-policys-name", "tandem.rollout.native:NativeEngine.load_weights", _without_its_name, check_both_ends_agree),
    Breaker(8, "age-not-looked-at", "tandem.trainer.intake:Intake.take", _unasked, check_nothing_too_old_is_trained_on),
]
