"""Rewards before they become advantages, and which episodes to draw: per episode, without tokens.

Legend: B episodes.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tandem.algos.checks import checked
from tandem.algos.ratios import check_choice
from tandem.errors import EmptyBatchError


@checked
def overlong_penalty(
    rewards_B: Tensor, response_lengths_B: Tensor, *, max_len: int, buffer_len: int, penalty_factor: float = 1.0
) -> Tensor:
    """R_i - penalty_factor min(max(len_i - (max_len - buffer_len), 0), buffer_len) / buffer_len.

    DAPO, arXiv 2503.14476, section 3.4. response_lengths_B counts sampled tokens.
    Raises ValueError for a buffer that is not in (0, max_len].
    """
    if not 0 < buffer_len <= max_len:
        raise ValueError(f"buffer_len must be in (0, max_len={max_len}], got {buffer_len}")
    over_B = (response_lengths_B - (max_len - buffer_len)).clamp(0, buffer_len).to(rewards_B.dtype)
    return rewards_B - penalty_factor * over_B / buffer_len


@checked
def stop_properly(rewards_B: Tensor, truncated_B: Tensor, *, coef: float) -> Tensor:
    """What an episode that ran out of tokens earns: coef R_i, or coef itself where coef is negative (ProRL, arXiv 2505.24864)."""
    return torch.where(truncated_B.bool(), rewards_B * coef if coef >= 0 else torch.full_like(rewards_B, coef), rewards_B)


Resampling = Literal["pow", "max_min", "max_random"]


@checked
def resampling_weights(scores_B: Tensor, *, method: Resampling = "pow", weight_pow: float = 2.0) -> Tensor:
    """How likely an episode is to be drawn, up to a constant: [B] (PF-PPO, arXiv 2409.06957).

    pow |s|^weight_pow; max_min 1 for the batch's highest and lowest score and 0 else; max_random 0.4 for the highest and 0.1 else;
    plus 1e-8, so that none is impossible. scores_B: s, the sum of an episode's token scores, which is its reward.
    Raises ValueError for a weight_pow that is not positive, EmptyBatchError where there is no episode.
    """
    if not weight_pow > 0:
        raise ValueError(f"resampling_pow must be positive, got {weight_pow}: 0 draws all alike, so leave resampling out")
    check_choice("method", method, get_args(Resampling))
    if not len(scores_B):
        raise EmptyBatchError("column 'scores' is empty: there is no episode to draw")
    highest, lowest = scores_B.max(), scores_B.min()
    match method:
        case "pow":
            weights = scores_B.abs() ** weight_pow
        case "max_min":
            weights = ((scores_B == highest) | (scores_B == lowest)).to(scores_B.dtype)
        case "max_random":
            weights = torch.where(scores_B == highest, 0.4, 0.1).to(scores_B.dtype)
    return weights + 1e-8


@checked
def resampling_probabilities(weights_B: Tensor) -> Tensor:
    """[B], summing to 1."""
    return weights_B / weights_B.sum()


def resample_counts(scores_B: Tensor, uniforms_B: Tensor, *, method: Resampling = "pow", weight_pow: float = 2.0) -> Tensor:
    """How often each episode comes up in B draws with replacement by `resampling_weights`: float32 [B], summing to B.

    uniforms_B: in [0, 1), one number a draw.
    """
    weights = resampling_weights(scores_B.double(), method=method, weight_pow=weight_pow)
    upper_B = resampling_probabilities(weights).cumsum(0)
    drawn_B = torch.searchsorted(upper_B / upper_B[-1:], uniforms_B.double(), right=True)
    return torch.bincount(drawn_B, minlength=len(scores_B)).float()
