"""What training asks of a model: hidden states of whole rows, an output layer, and parameters with Hugging Face names.

decoder.py is the one that generation shares; auto.py is any other that transformers knows. heads.py turns what they give into
log-probabilities.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.errors import ConfigError
from tandem.models.adapters import Adapter


class LanguageModel(nn.Module):
    """config: its shape, with vocab_size; dtype: the compute dtype. Parameters are float32.

    recompute: of a layer only the input is kept for the backward pass, which computes the rest again, the same bits.
    adapter: of which all but its parameters are frozen, if there is one; lora.py puts it in.
    """

    config: Any

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.recompute = False
        self.adapter: Adapter | None = None

    @classmethod
    @abstractmethod
    def shaped(cls, config: Any, dtype: torch.dtype) -> LanguageModel:
        """A model of the shape of another, whose `config` it is; its weights are yet to come."""

    @property
    @abstractmethod
    def max_positions(self) -> int | None:
        """Tokens of the longest row, where there is a bound."""

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """The parts that a sharded model gathers one by one, and that an adapter is put into."""

    @property
    def pads(self) -> bool:
        """Whether rows that pass together cost as much as the longest of them."""
        return True

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """That a sharded layer may be gathered in and compute the same; None is the parameters' own."""
        return None

    @property
    @abstractmethod
    def tied(self) -> dict[str, str]:
        """Weights that have no storage of their own: name -> the one that has it."""

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """[V, D] in the compute dtype: the output layer, whose product with a hidden state is the logits."""

    @property
    def whole(self) -> nn.Module:
        """The module in which layers are replaced when an adapter is put in."""
        return self

    @abstractmethod
    def prefill(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, T, D] in the compute dtype after the final norm of tokens [B, T] int64, causal from position 0.

        Right padding is inert. Raises EngineError for rows that are too long for the model.
        """

    def states_at(self, tokens: Tensor, lengths: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states [n, D] of tokens[b, t] for the places (b, t) of `at`, two int64 [n], differentiable.

        tokens int64 [B, T], padded on the right with any token, and lengths int64 [B], within which the places are. Raises
        EngineError for rows that are too long for the model.
        """
        return self.prefill(tokens[:, : max(int(lengths.max()), 1)])[at]

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """By their Hugging Face names; not those of an adapter."""
        return dict(self.named_parameters()) if self.adapter is None else self.adapter.frozen()

    def below(self, top_layers: int) -> frozenset[str]:
        """The parameters that come before the last `top_layers` layers: embeddings and layers; none for 0.

        Raises ConfigError where there are fewer layers.
        """
        if top_layers > len(self.layers):
            raise ConfigError(f"top_layers={top_layers} are to be trained, and the model has {len(self.layers)} layers: lower it")
        names: list[str] = []
        first = next(self.layers[-top_layers].parameters()) if top_layers else next(self.parameters())
        for name, parameter in self.named_parameters():
            if parameter is first:
                break
            names.append(name)
        return frozenset(names)

    def weights(self) -> dict[str, Tensor]:
        """Every weight that is not tied by its Hugging Face name, what an adapter adds included."""
        if self.adapter is not None:
            return self.adapter.merged()
        return {name: parameter.detach() for name, parameter in self.named_parameters()}
