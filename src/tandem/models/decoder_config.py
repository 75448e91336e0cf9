"""The shape of a decoder: what a family of models adds to the one definition of decoder.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.models import numerics


@dataclass(frozen=True)
class StretchedRope:
    """Llama 3's way to longer contexts: frequencies of long waves are divided by `factor`.

    A wave of more than original_positions / low_factor positions is long, one of fewer than original_positions / high_factor
    stays as it is, and what is between is in between.
    """

    factor: float
    low_factor: float
    high_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low_factor < self.high_factor and self.original_positions >= 1):
            raise ValueError(f"rotary positions cannot be stretched by {self}")

    def __call__(self, frequencies: Tensor) -> Tensor:
        waves = 2 * math.pi / frequencies
        share = (self.original_positions / waves - self.low_factor) / (self.high_factor - self.low_factor)
        between = (1 - share) * frequencies / self.factor + share * frequencies
        found = torch.where(waves > self.original_positions / self.low_factor, frequencies / self.factor, between)
        return torch.where(waves < self.original_positions / self.high_factor, frequencies, found)


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    attention_bias: on the q, k and v projections; output_bias: on the o projection; mlp_bias: on all three of the MLP;
    qk_norm: RMS norm of each head's queries and keys; max_positions: tokens of the longest row. activation: of the MLP's gate;
    norm_offset: added to the weights of norms; embedding_scale: times the embedding, where it is the input; unrotated: layers
    without rotary positions.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    stretched: StretchedRope | None = None
    unrotated: tuple[int, ...] = ()
    rms_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: numerics.Activation = "silu"
    embedding_scale: float = 1.0
    tie_embeddings: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 2048

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        for name in ("rope_theta", "rms_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
