"""Training over several processes: the model's weights, gradients and optimiser state are cut into shards (FSDP2).

`fsdp_engine` makes a TorchEngine whose decoder is sharded by `torch.distributed.fsdp.fully_shard`, layer by layer: a layer's
weights are gathered in the compute dtype, and its gradients are reduced in float32, once for all micro-batches of a call. Where
the whole model is small beside the device's memory a layer is gathered once in a call, and else for each forward and again for
its backward. With `replicas` above 1 each shard exists that often (HSDP). Gathered weights are exact copies, so that in float32
and in bfloat16 log-probabilities are those of one process, bit for bit.

FSDP2 averages gradients over ranks, and so do metrics; loss weights that make up for it are `step_columns(..., ranks=)`.
A rank with fewer micro-batches than another, or with none, takes part in the rest with passes without tokens.

The model must exist whole on each rank before it is cut; tensor and sequence parallelism are not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tandem import device
from tandem.device import Device
from tandem.models.language_model import LanguageModel
from tandem.train import shard_files
from tandem.train.config import TrainConfig
from tandem.train.ranks import Part
from tandem.train.torch_engine import TorchEngine

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_SMALL = 1 / 32  # of a device's memory: a model that takes no more stays gathered for a call


@dataclass(frozen=True)
class FsdpConfig:
    """replicas: how many whole copies of the model the ranks hold; the ranks of one copy are neighbours.

    offload: shards, gradients and optimiser state live in the host's memory, where steps are taken too; a layer is on the device
    while it computes. Where the device is the CPU that changes nothing.
    """

    replicas: int = 1
    offload: bool = False


def fsdp_engine(decoder: LanguageModel, config: TrainConfig, fsdp: FsdpConfig, where: Device, *, limit_s: float) -> TorchEngine:
    """One rank's engine, in a process that `device.join` made a rank; each rank gives the same decoder, which is cut in place.

    limit_s: of each collective between shards or replicas. Raises DeviceError where the ranks cannot be `fsdp.replicas` copies.
    """
    mesh, writing = device.mesh(where, fsdp.replicas, limit_s), device.group_apart(limit_s)
    size = sum(parameter.nbytes for parameter in decoder.parameters())
    small = not fsdp.offload and size <= _SMALL * where.memory().total_bytes
    return TorchEngine(decoder, config, Shards(decoder, mesh, writing, keep=small, offload=fsdp.offload))


class _Root(nn.Module):
    """Runs a function of the decoder as a module's forward, which is what gathers the weights outside the layers."""

    def __init__(self, decoder: LanguageModel) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(self.decoder, *args, **kwargs)


class Shards:
    """Implements ranks.Ranks over a mesh of axes "replica" and "shard"; dimension 0 of each weight is cut along the latter.

    writing: of the same ranks, who meet there only to write files. keep: whether what was gathered stays until the end of a call;
    if all ranks say so.
    """

    def __init__(
        self, decoder: LanguageModel, mesh: DeviceMesh, writing: dist.ProcessGroup, *, keep: bool = False, offload: bool = False
    ) -> None:
        self._mesh, self._writing = mesh, writing
        self._keep = all(self.gather(keep))
        home = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
        policy = MixedPrecisionPolicy(param_dtype=decoder.gathered_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=home, reshard_after_forward=not self._keep)
        self._root = fully_shard(_Root(decoder), mesh=mesh, offload_policy=home)
        self._units = [unit for unit in cast("nn.Module", self._root).modules() if isinstance(unit, FSDPModule)]

    @property
    def index(self) -> int:
        return dist.get_rank()

    @property
    def replicas(self) -> int:
        return self._mesh["replica"].size()

    @property
    def replica(self) -> int:
        return self._mesh.get_local_rank("replica")

    def meeting(self, what: str) -> AbstractContextManager[None]:
        return device.meeting(what)

    @contextmanager
    def computing(self, what: str) -> Generator[None]:
        try:
            with self.meeting(what):
                yield
        finally:
            for unit in self._units:  # a step or a load changes the shards, and never what was gathered of them
                unit.reshard()

    def gather(self, value: T) -> Sequence[T]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def run(self, function: Callable[Concatenate[LanguageModel, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        with _reset_on_error(self._root):
            return cast("nn.Module", self._root)(function, *args, **kwargs)

    def passing(self, *, last: bool) -> None:
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        self._root.set_reshard_after_backward(last or not self._keep)

    def norm(self, gradients: Sequence[Tensor]) -> float:
        norm = torch.nn.utils.get_total_norm([_local(gradient) for gradient in gradients], foreach=False)
        squared = norm.double() ** 2
        dist.all_reduce(squared, group=self._mesh.get_group("shard"))
        return math.sqrt(squared.item())

    def part(self, weight: Tensor) -> Part | None:
        here = _local(weight)
        rows = -(-weight.shape[0] // self._mesh["shard"].size())
        start = rows * self._mesh.get_local_rank("shard")
        return ((start,) + (0,) * (weight.ndim - 1), here) if here.numel() else None

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        shard_files.write(path, tensors, self._writing)

    def shapes(self, path: Path) -> Mapping[str, tuple[int, ...]]:
        return shard_files.shapes(path)

    def read(self, path: Path, like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return shard_files.read(path, like, alone=False)


def _local(tensor: Tensor) -> Tensor:
    return cast("DTensor", tensor.detach()).to_local()


@contextmanager
def _reset_on_error(root: FSDPModule) -> Generator[None]:
    """What a forward that raised has left half done would fail the next one."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            root.reset_iter_state()
