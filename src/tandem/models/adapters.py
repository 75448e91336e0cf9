"""What an adapter is to the rest of the system: weights beside a frozen model, which alone are trained and can be switched off.

lora.py makes one, and needs the package `peft`; this file needs nothing, so that everything else can speak of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor, nn

_LARGEST_RANK = 4096


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adaptation (arXiv 2106.09685): a weight W acts as W + alpha / rank * B A, and A and B alone are trained.

    targets: names of projections, such as q_proj, that get one, in every layer that has it; none stands for every projection
    of the layers. There is no dropout: the policy that is trained is the one that sampled.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _LARGEST_RANK:
            raise ValueError(f"rank must be from 1 to {_LARGEST_RANK}, got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be positive and finite, got {self.alpha}")


class Adapter(Protocol):
    """Of one model. base: fingerprint of the weights that it is beside; who changes those sets it."""

    base: str

    @property
    def config(self) -> LoraConfig: ...

    @property
    def seed(self) -> int:
        """That it began with."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Its parameters in the model."""
        ...

    def frozen(self) -> dict[str, nn.Parameter]:
        """The model's other parameters, by the names that they have without an adapter."""
        ...

    def switched_off(self) -> AbstractContextManager[None]:
        """Within, the model is the frozen one, bit for bit."""
        ...

    def merged(self) -> dict[str, Tensor]:
        """Each weight of the model by its Hugging Face name, with what the adapter adds to it."""
        ...

    def save(self, directory: Path) -> None:
        """In PEFT's format, into a directory that exists. Raises OSError."""
        ...


def trained(model: nn.Module, adapter: Adapter | None) -> dict[str, nn.Parameter]:
    """What an optimiser is for: the adapter's parameters, where there is one, or else all. The others want no gradient."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(adapter is None or name in adapter.names)
        if parameter.requires_grad:
            found[name] = parameter
    return found


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Of names, shapes and bits, in any order: the sum of each weight's xxh3 (128 bits), hexadecimal."""
    total = 0
    for name, weight in weights:
        digest = xxhash.xxh3_128(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        total += digest.intdigest()
    return f"{total % (1 << 128):032x}"
