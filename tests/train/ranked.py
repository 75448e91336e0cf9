"""A worker for tests of engines that are spread over ranks: each rank gets its own part of what a call is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tandem import device
from tandem.data_proto import DataProto
from tandem.durable import beside
from tandem.errors import StalledError
from tandem.models.adapters import trained
from tandem.models.language_model import LanguageModel
from tandem.ports import Collect, Dispatch, register
from tandem.runtime.placement import Rank
from tandem.train import fsdp
from tandem.train.config import TrainConfig
from tandem.train.fsdp import FsdpConfig, fsdp_engine
from tandem.train.torch_engine import TorchEngine
from tandem.types import LossRef, Metrics
from tandem.weights import WeightLayout, WeightShard


@dataclass(frozen=True)
class Trained:
    """metrics: by step. gradient, weights: what is here of each weight, in the first step and after the last."""

    metrics: list[Metrics]
    gradient: list[WeightShard]
    weights: list[WeightShard]
    layout: WeightLayout


class Trainer:
    """One rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.engine: TorchEngine

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def make(
        self,
        decoder: LanguageModel,
        config: TrainConfig,
        replicas: int = 1,
        limit_s: float = 60.0,
        offload: bool = False,
        small: bool = True,
    ) -> None:
        """small: as its size says; else as a model that is large for the device."""
        trained(decoder, decoder.adapter)  # what wants a gradient does not travel with a tensor
        with nullcontext() if small else patch.object(fsdp, "_SMALL", 0):
            self.engine = fsdp_engine(decoder, config, FsdpConfig(replicas, offload), device.select("cpu"), limit_s=limit_s)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def train(self, steps: Sequence[Sequence[DataProto]], loss: LossRef) -> Trained:
        """Each of the steps has a part for each rank."""
        return train(self.engine, [parts[self.rank.index] for parts in steps], loss)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def score(self, parts: Sequence[DataProto], want: frozenset[str]) -> DataProto:
        return self.engine.forward(parts[self.rank.index], want)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def evaluate(self, parts: Sequence[DataProto], loss: LossRef) -> Metrics:
        return self.engine.evaluate(parts[self.rank.index], loss)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def reductions(self, parts: Sequence[DataProto], loss: LossRef) -> int:
        """How often gradients are reduced over shards in one call."""
        with patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as reduce:
            self.engine.forward_backward(parts[self.rank.index], loss)
        return reduce.call_count

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def gatherings(self, parts: Sequence[DataProto], loss: LossRef) -> int:
        """How often weights are gathered from shards in one call."""
        with patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gather:
            self.engine.forward_backward(parts[self.rank.index], loss)
        return gather.call_count

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def save(self, path: Path) -> None:
        self.engine.save(path)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def train_while_saving(self, path: Path, steps: Sequence[Sequence[DataProto]], loss: LossRef) -> Trained:
        """What a save would write now is written while the steps are trained."""
        saved = beside("saving", partial(self.engine.snapshot(), path))
        found = train(self.engine, [parts[self.rank.index] for parts in steps], loss)
        saved.result(60)
        return found

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def train_and_save_within(self, path: Path, steps: Sequence[Sequence[DataProto]], loss: LossRef) -> Trained:
        """The same, between the first forward and its backward."""
        writes, ranks = [partial(self.engine.snapshot(), path)], self.engine._ranks
        run = ranks.run

        def ran(*args: Any, **kwargs: Any) -> Any:
            found = run(*args, **kwargs)
            if writes:
                beside("saving", writes.pop()).result(60)
            return found

        with patch.object(ranks, "run", ran):
            return train(self.engine, [parts[self.rank.index] for parts in steps], loss)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def load(self, path: Path) -> None:
        self.engine.load(path)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def load_weights(self, path: Path) -> None:
        self.engine.load_weights(path)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def layout(self) -> WeightLayout:
        return self.engine.layout()

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def weights(self) -> list[WeightShard]:
        return list(self.engine.weight_shards())

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def late(self, parts: Sequence[DataProto], seconds: float) -> str:
        """What a rank says that waits for the last one, which says how many passes it has and then computes for too long."""
        if self.rank.index == self.rank.size - 1:
            self.engine._ranks.gather(1)
            time.sleep(seconds)  # noqa: ASYNC251
            return ""
        try:
            self.engine.forward(parts[self.rank.index], frozenset({"logprobs"}))
        except StalledError as error:
            return str(error)
        return "nobody was missed"


def train(engine: TorchEngine, steps: Sequence[DataProto], loss: LossRef) -> Trained:
    metrics: list[Metrics] = []
    gradient: list[WeightShard] = []
    for batch in steps:
        found, _ = engine.forward_backward(batch, loss)
        if not metrics:
            gradients = {name: parameter.grad for name, parameter in engine.decoder.named_parameters()}
            gradient = [
                replace(shard, tensor=_local(gradients[shard.name]))
                for shard in engine.weight_shards()
                if gradients[shard.name] is not None
            ]
        metrics.append(found + engine.step())
    weights = [replace(shard, tensor=shard.tensor.clone()) for shard in engine.weight_shards()]
    return Trained(metrics, gradient, weights, engine.layout())


def _local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


def whole(shards: Sequence[WeightShard]) -> dict[str, Tensor]:
    """Weights from blocks of all ranks, which must fill them; where replicas give a block more than once, all must agree."""
    found: dict[str, Tensor] = {}
    for shard in shards:
        tensor = found.setdefault(shard.name, torch.full(shard.shape, torch.nan))
        block = tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.tensor.shape, strict=True))
        assert tensor[block].isnan().all() or torch.equal(tensor[block], shard.tensor), shard.name
        tensor[block] = shard.tensor
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found
