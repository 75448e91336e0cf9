"""Tiny decoders for the tests of this room, with weights large enough for every part to show in the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tandem.models.decoder import Decoder
from tandem.models.decoder_config import DecoderConfig


def config(heads: int = 4, kv_heads: int = 2, head_dim: int = 16, **fields: Any) -> DecoderConfig:
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": 1024,
    }
    return DecoderConfig(**(shape | fields))


def loud(shape: DecoderConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """Random weights that keep activations near 1, biases and norms included."""
    made = Decoder(shape, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.1 * noise)
    return made


def tokens(rows: int, length: int, vocabulary: int = 61, seed: int = 1) -> torch.Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
