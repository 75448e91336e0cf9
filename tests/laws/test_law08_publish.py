"""Law 8: after a publish both ends agree on the weights' hash and on what they predict; nothing older is used or trained on.

Trainer and engine have weights of their own, unless they are published in place. The second half is
whose samples may be trained on.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tandem.checkpoint.encoding import Full
from tandem.checkpoint.in_place import InPlace
from tandem.checkpoint.publisher import Publisher
from tandem.data_proto import DataProto
from tandem.errors import StalenessError
from tandem.models.decoder import init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.models.lora import add_lora
from tandem.ports import Consumer, Lease, WeightSource
from tandem.queue.fake import FakeQueue
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.weights import load as _load
from tandem.runtime.inline import InlineGroup
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.intake import Intake
from tandem.trainer.schedule import schedule
from tandem.trainer.workers import ModelWorker
from tandem.types import GenerateRequest, GroupKey, Key, LossRef, PolicyRef, Sample, SamplingParams
from tandem.weights import WeightBlock, WeightPiece, wire_hash
from tests.contracts.test_checkpoint_engine import TRANSPORTS, publisher
from tests.laws.breaking import Breaker
from tests.train.rows import LORA

CONFIG = DecoderConfig(17, 16, 32, 1, 2, 1, 8, max_positions=64)


class Damaged(NativeEngine):
    """One number of what it was given is another."""

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        await super().load_weights(source, policy)
        with torch.no_grad():
            next(self._decoder.parameters())[0, 0] += 1e-6


async def sample(engine: NativeEngine, policy: PolicyRef) -> Sample:
    request = GenerateRequest(Key("probe", policy.version), (1, 2, 3), SamplingParams(max_tokens=12), seed=0)
    chunks = [chunk async for chunk in engine.generate(request)]
    assert {chunk.policy for chunk in chunks} == {policy}, "what was sampled is marked with another policy"
    tokens = np.array([*request.tokens, *(token for chunk in chunks for token in chunk.tokens)])
    logprobs = np.array([0.0, 0.0, 0.0, *(value for chunk in chunks for value in chunk.logprobs)], np.float32)
    return Sample(request.key, tokens, np.arange(15) >= 3, logprobs, ((policy, 12),), "length")


def check_both_ends_agree(
    transport: str = "shared_memory", encoding: str = "full", *, tied: bool = True, adapter: bool = False, dtype: str = "float32"
) -> None:
    """Three updates, each published; before every publish the engine still holds what was published last."""

    async def scenario(path: Path) -> None:
        compute = getattr(torch, dtype)
        decoder, copy = (init_decoder(replace(CONFIG, tie_embeddings=tied), 3, compute) for _ in range(2))
        for model in (decoder, copy) if adapter else ():
            add_lora(model, LORA, 0)
        trainer = TorchEngine(decoder, TrainConfig(lr=0.05))
        rollout = NativeEngine(decoder if transport == "in_place" else copy, str, NativeConfig(slots=4, max_context=64), exact=True)
        checkpoint = publisher(InPlace() if transport == "in_place" else TRANSPORTS[transport](path), encoding)
        policy, seen = PolicyRef(), set[str]()
        await checkpoint.connect(InlineGroup([ModelWorker(trainer, FakeQueue())]), [rollout])
        for _ in range(3):
            policy = policy.next()
            await checkpoint.publish(policy)
            mine = dict(rollout._decoder.named_parameters())
            for spec, shard in zip(trainer.layout().specs, trainer.weight_shards(), strict=False):
                sent = shard.tensor.to(spec.wire or shard.tensor.dtype)
                assert torch.equal(mine[shard.name].to(sent.dtype), sent), "the engine holds other bits"
            seen.add(wire_hash(trainer.weight_shards()))
            rows = DataProto.from_samples([await sample(rollout, policy)])
            given = trainer.forward(rows, frozenset({"logprobs"}))["logprobs"]
            assert torch.equal(given, rows["rollout_logprobs"]), "the engine predicts something else"
            trainer.forward_backward(rows.with_columns(token={"loss_weights": rows["mask"].float()}), LossRef("nll"))
            trainer.step()
        assert len(seen) == 3, "an update changed nothing"
        await checkpoint.aclose()
        await rollout.close()

    with tempfile.TemporaryDirectory() as path:
        asyncio.run(scenario(Path(path)))


def check_who_does_not_agree_is_not_admitted() -> None:
    """An engine that keeps what older weights computed, or misses an update, is noticed by the handshake and by nothing else."""

    async def scenario(path: Path) -> None:
        for name, make in TRANSPORTS.items():
            decoder, good, bad = (init_decoder(CONFIG, 3) for _ in range(3))
            trainer = TorchEngine(decoder, TrainConfig())
            engines = [NativeEngine(good, str, NativeConfig(slots=1, max_context=64), exact=True)]
            engines.append(Damaged(bad, str, NativeConfig(slots=1, max_context=64), exact=True))
            checkpoint = publisher(make(path / name))
            await checkpoint.connect(InlineGroup([ModelWorker(trainer, FakeQueue())]), engines)
            metrics = await checkpoint.publish(PolicyRef(version=1))
            assert checkpoint.admitted == (engines[0],), "an engine with other bits is admitted"
            assert metrics["publish/left_out"].value == 1
            await checkpoint.aclose()

    with tempfile.TemporaryDirectory() as path:
        asyncio.run(scenario(Path(path)))


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


MODELS = {"tied": {}, "untied": {"tied": False}, "adapter": {"adapter": True}, "bf16": {"dtype": "bfloat16"}}
WAYS = [("in_place", "full"), *((name, encoding) for name in TRANSPORTS for encoding in ("full", "delta"))]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("transport", "encoding"), WAYS, ids=[" ".join(way) for way in WAYS])
def test_both_ends_agree(transport: str, encoding: str, model: str) -> None:
    check_both_ends_agree(transport, encoding, **MODELS[model])


def test_who_does_not_agree_is_not_admitted() -> None:
    check_who_does_not_agree_is_not_admitted()


def test_nothing_too_old_is_trained_on() -> None:
    check_nothing_too_old_is_trained_on()


# ---------------------------------------------------------------------------------------------------- breakers

_load_weights, _agree, _encode = NativeEngine.load_weights, Publisher._agree, Full.encode
_first: dict[WeightBlock, Tensor] = {}


def _what_was_sent_first(self: Full, block: WeightBlock, tensor: Tensor, *rest: Any) -> WeightPiece:
    return _encode(self, block, _first.setdefault(block, tensor.clone()), *rest)


def _all_but_one_weight(module: nn.Module, source: WeightSource) -> None:
    kept = next(module.parameters()).detach().clone()
    _load(module, source)
    next(module.parameters()).detach().copy_(kept)


async def _admits_anybody(self: Publisher, target: Any, *_: Any) -> None:
    target.admitted = True


async def _without_its_name(self: NativeEngine, source: Any, policy: PolicyRef) -> None:
    await _load_weights(self, source, policy)
    self._policy = PolicyRef(version=policy.version - 1)


async def _unasked(self: Intake) -> Lease:
    return await self._queue.take(Consumer("learner"), frozenset({"tokens", "mask"}), 1)


BREAKERS = [
    Breaker(8, "old-weights-again", "tandem.checkpoint.encoding:Full.encode", _what_was_sent_first, check_both_ends_agree),
    Breaker(8, "a-weight-left-out", "tandem.rollout.weights:load", _all_but_one_weight, check_both_ends_agree),
    Breaker(8, "another-policys-name", "tandem.rollout.native:NativeEngine.load_weights", _without_its_name, check_both_ends_agree),
    Breaker(
        8, "no-handshake", "tandem.checkpoint.publisher:Publisher._agree", _admits_anybody, check_who_does_not_agree_is_not_admitted
    ),
    Breaker(8, "age-not-looked-at", "tandem.trainer.intake:Intake.take", _unasked, check_nothing_too_old_is_trained_on),
]
