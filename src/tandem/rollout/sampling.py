"""From a distribution and a uniform to a token, each row for itself.

A row's token and logprob are the same bits whatever rows stand beside it: every operation here works along the
vocabulary of one row, and a row that cuts nothing takes the same path whether or not another row does. Nothing is
sorted unless a row asks for top-k, top-p or min-p. Draws come from randomness.py; log-probabilities come from
models/heads.py, already scaled by temperature.

Legend: M rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.errors import NonFiniteError


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """How each row chooses: [M] each. greedy bool; top_p float64, 1 is off; top_k int64, 0 is off; min_p float64, 0 is off."""

    greedy: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    def cutting(self) -> Tensor:
        """The rows that cut something."""
        return torch.from_numpy(np.flatnonzero((self.top_p.numpy() < 1) | (self.top_k.numpy() > 0) | (self.min_p.numpy() > 0)))


def sample(logprobs: Tensor, uniforms: Tensor, choices: Choices | None = None) -> tuple[Tensor, Tensor]:
    """Tokens int64 [M] and their float32 [M] entries of `logprobs`, which is the whole distribution: float32 [M, V].

    A greedy row takes the likeliest token, the lowest id among equals. Any other row takes the first token whose
    cumulative probability exceeds uniforms[m] (float64 [M], in [0, 1)), in order of ids, over the tokens that
    `kept_weights` leaves; a token of probability 0 is never taken. Without choices no row is greedy or cuts anything. Raises
    NonFiniteError for a row with NaN.
    """
    weights = torch.softmax(logprobs, -1)  # row by row; exp over the whole block would split it between threads
    if choices is not None and len(rows := choices.cutting()):
        weights[rows] = kept_weights(weights[rows], choices.top_p[rows], choices.top_k[rows], choices.min_p[rows])
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not (found := total.numpy() > 0).all():
        bad = int((~found).sum())
        raise NonFiniteError(
            f"the distributions of {bad} of {len(logprobs)} rows are not finite; the weights are probably NaN or infinite"
        )
    target = uniforms[:, None] * total  # below the last entry even for the largest uniform, 1 - 2^-53
    tokens = torch.searchsorted(cumulative, target, right=True)
    if choices is not None and choices.greedy.numpy().any():
        tokens = torch.where(choices.greedy[:, None], logprobs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def kept_weights(weights: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities [M, V] with 0 for the tokens that are cut; not normalised again.

    Tokens are ranked by probability, the lower id first among equals. min_p keeps those with at least min_p times the
    largest probability, top_k the first k of them, and top_p the shortest prefix of these whose share of what is left
    reaches top_p. The likeliest token is always kept.
    """
    ranked, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1])
    keep = (ranked >= min_p[:, None] * ranked[:, :1]) & ((rank < top_k[:, None]) | (top_k[:, None] == 0))
    cumulative = ranked.where(keep, 0.0).cumsum(-1, dtype=torch.float64)
    before = cumulative.roll(1, -1)
    before[:, 0] = 0.0
    keep &= (before < top_p[:, None] * cumulative[:, -1:]) | (top_p[:, None] == 1)
    return torch.zeros_like(weights).scatter_(1, order, ranked.where(keep, 0.0))
