"""A model that gives each token a number: the body of a decoder with a scalar head, as critics and reward models are.

It is what transformers calls ForSequenceClassification with one label. Which hidden state is a token's is heads.py's to say.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tandem.models.decoder import Decoder, Projection
from tandem.models.decoder_config import DecoderConfig

VALUE_HEAD = "score.weight"


class ValueModel(Decoder):
    """A decoder whose output layer is one row, `score.weight`; it begins at 0, and so do all values."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(replace(config, tie_embeddings=True), dtype)
        self.score = Projection(config.hidden_size, 1, False)

    @property
    def tied(self) -> dict[str, str]:
        return {}

    def values(self, hidden: Tensor) -> Tensor:
        """Float32 [M] of hidden states [M, D], summed in float32 row by row, so that a row's bits are its own."""
        return (hidden.float() * self.score.weight).sum(1)


def value_model_on(decoder: Decoder) -> ValueModel:
    """A value model whose body is the decoder's own, so that what trains the one changes the other; its values are 0 at first.

    A value model is its own.
    """
    if isinstance(decoder, ValueModel):
        return decoder
    model = ValueModel(decoder.config, decoder.dtype)
    model.model = decoder.model
    return model
