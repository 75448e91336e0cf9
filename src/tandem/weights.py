"""A model's weights as they pass between engines: names and shapes, blocks, and whose blocks they are. Nothing is moved here."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Where a weight lives, in Hugging Face coordinates. tied_to: the name that owns the storage, if another does."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tied_to: str | None = None


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All weights of a model; `replicas` whole copies of them exist, and this rank holds shards of copy `replica`."""

    specs: tuple[WeightSpec, ...]
    replicas: int = 1
    replica: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class WeightShard:
    """A block of one weight: `tensor` sits at `offsets` of the global weight `name` of shape `shape`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart:
    """What one rank holds of a model, and the hash of it: `tandem.checkpoint.wire.wire_hash(shards)`."""

    layout: WeightLayout
    shards: tuple[WeightShard, ...]
    wire_hash: str
