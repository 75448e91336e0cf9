"""Advantages: how much better an episode did than expected. Pure functions of the rewards of a whole batch.

Groups are told apart by id and never by position, and statistics count episodes: an episode that became several rows
is given once, and its advantage is spread over the sampled tokens of all of them afterwards (`spread`). Estimators
that need a critic or token rewards are not here. A batch has some hundred rewards: they are worked on by NumPy on the host, in
float64, and the result is where the rewards are.

Legend: B episodes, N packed tokens; R_i reward, g group of episode i, n its size.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tandem.algos.checks import checked, keep, num_counted
from tandem.algos.ratios import check, check_choice
from tandem.algos.segments import Array, Groups, on_tokens, to_array


@checked
def group_baseline(
    rewards_B: Tensor,
    groups_B: Tensor,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    std_eps: float = 1e-6,
    ddof: Literal[0, 1] = 1,
    leave_one_out: bool = False,
    singleton: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """A_i = (R_i - mean_g) / (std_g + std_eps): GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Equal rewards give exactly 0 whatever their binary representation, and rewards are centred before they are squared.

    Args:
        rewards_B: [B], finite.
        groups_B: int64 [B], the same id for episodes of one group, in any order.
        scale: divide by the standard deviation of the group, of the whole batch, or not at all (Dr. GRPO, 2503.20783).
        std_eps: added to the standard deviation.
        ddof: the deviation's denominator is the count less this.
        leave_one_out: mean_g and std_g over the other members; a deviation of 0 then does not divide.
        singleton: what a group of one gets, 0 or its raw reward.

    Returns:
        float32 [B].

    Raises:
        ValueError: parameters that contradict each other.
        NonFiniteError: a reward is NaN or infinite.
    """
    check_choice("scale", scale, ("group", "batch", "none"))
    if leave_one_out and scale == "batch":
        raise ValueError("leave_one_out describes the group's statistics and scale=batch does not use its deviation; choose one")
    return _column(_group_baseline(rewards_B, Groups(groups_B), scale, std_eps, ddof, leave_one_out, singleton), rewards_B)


def _group_baseline(
    rewards_B: Tensor, groups: Groups, scale: str, std_eps: float, ddof: int, leave_one_out: bool, singleton: str
) -> Array:
    """[B]: `group_baseline` before it is rounded."""
    check_choice("singleton", singleton, ("zero", "reward"))
    check(std_eps >= 0, f"std_eps must not be negative, got {std_eps}")
    shifted = _shifted(rewards_B, groups)
    centred = shifted - groups.mean(shifted)
    if leave_one_out:
        advantages = _among_others(centred, groups, std_eps if scale == "group" else None, ddof)
    elif scale == "group":
        advantages = centred / groups.members(_divisor(_deviations(centred, groups, ddof) + std_eps))
    elif scale == "batch":
        squares_of_all = (_centred(to_array(rewards_B)) ** 2).sum()
        advantages = centred / _divisor(np.sqrt(squares_of_all / max(len(centred) - ddof, 1)) + std_eps)
    else:
        advantages = centred
    if singleton == "reward":
        alone = groups.size == 1  # whose advantage is 0 without this, since its own mean is its reward
        advantages = np.where(alone, to_array(rewards_B), advantages)
    return advantages


def _deviations(centred_B: Array, groups: Groups, ddof: int) -> Array:
    """[G]: the standard deviation of each group, from values less its mean."""
    return np.sqrt(groups.totals(centred_B * centred_B) / np.maximum(groups.sizes - ddof, 1))


def _among_others(centred_B: Array, groups: Groups, std_eps: float | None, ddof: int) -> Array:
    """[B]: each value less the mean of the other members, over their deviation where `std_eps` is given."""
    others_G = np.maximum(groups.sizes - 1, 1)
    advantages = centred_B * groups.members((others_G + 1) / others_G)
    if std_eps is None:
        return advantages
    # The squares around the mean of the others: take out this episode's own, then shift the centre. What rounding leaves of
    # equal others is not a deviation.
    squares, others = groups.sum(centred_B * centred_B), groups.members(others_G)
    of_others = squares - centred_B**2 - centred_B**2 / others
    std = np.sqrt(np.where(of_others > 1e-12 * squares, of_others, 0.0) / np.maximum(others - ddof, 1))
    return advantages / np.where(std > 0, std + std_eps, 1.0)


@checked
def batch_baseline(rewards_B: Tensor) -> Tensor:
    """A_i = R_i - mean over the whole batch: no group, no deviation (FlashREINFORCE, Hu et al.): float32 [B]."""
    return _column(_centred(to_array(rewards_B)), rewards_B)


@checked
def no_baseline(rewards_B: Tensor) -> Tensor:
    """A_i = R_i (REINFORCE, Williams 1992): float32 [B]."""
    return rewards_B.double().float()


@checked
def length_weighted_baseline(
    rewards_B: Tensor, groups_B: Tensor, token_counts_B: Tensor, *, singleton: Literal["zero", "reward"] = "zero"
) -> Tensor:
    """A_i = R_i - sum_g n_j R_j / sum_g n_j, the baseline of least variance under its assumptions (OPO, arXiv 2505.23585).

    token_counts_B: n_i, sampled tokens of each episode. Returns float32 [B]; a group without a token has none to spread it on.
    singleton: what a group of one gets, 0 or its raw reward.
    """
    rewards, groups, counts = to_array(rewards_B), Groups(groups_B), to_array(token_counts_B)
    shifted = rewards - groups.anchor(rewards)
    baseline = groups.sum(counts * shifted) / np.maximum(groups.sum(counts), 1)
    return _column(np.where(groups.size == 1, _alone(rewards_B, singleton), shifted - baseline), rewards_B)


@checked
def nonzero_scaled_baseline(rewards_B: Tensor, groups_B: Tensor, *, singleton: Literal["zero", "reward"] = "zero") -> Tensor:
    """A_i = B / #(R != 0) (R_i - mean_g), with B the batch's episodes (GPG, arXiv 2504.02546): float32 [B].

    Without a reward other than 0 there is nothing to scale and every advantage is 0. singleton: what takes the place of
    R_i - mean_g in a group of one, 0 or its raw reward.
    """
    groups = Groups(groups_B)
    shifted = _shifted(rewards_B, groups)
    centred = np.where(groups.size == 1, _alone(rewards_B, singleton), shifted - groups.mean(shifted))
    return _column(centred * (len(centred) / max(int(rewards_B.count_nonzero()), 1)), rewards_B)


@checked
def mean_normalized(rewards_B: Tensor, groups_B: Tensor, *, mean_eps: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean_g) / (mean_g + mean_eps), for rewards that are not negative (MaxRL, arXiv 2602.02710): float32 [B].

    A group whose mean is not positive has never succeeded and gets 0; so does a group of one.
    """
    check(mean_eps >= 0, f"mean_eps must not be negative, got {mean_eps}")
    groups = Groups(groups_B)
    shifted, mean = _shifted(rewards_B, groups), groups.mean(to_array(rewards_B))
    learns = (groups.size > 1) & (mean > 0)
    return _column(np.where(learns, (shifted - groups.mean(shifted)) / _divisor(mean + mean_eps), 0.0), rewards_B)


@checked
def best_of_group(
    rewards_B: Tensor, groups_B: Tensor, *, scale: Literal["group", "none"] = "group", std_eps: float = 1e-6
) -> Tensor:
    """Only the best episode of a group learns: A = (R_max - R_second) / (std_g + std_eps) (pass@k, arXiv 2503.19595): float32 [B].

    std_g has ddof 1 and does not divide with scale "none". With equal bests, the first of them has R_max - R_second = 0.
    """
    check(std_eps >= 0, f"std_eps must not be negative, got {std_eps}")
    check_choice("scale", scale, ("group", "none"))
    rewards, groups = to_array(rewards_B), Groups(groups_B)
    shifted = rewards - groups.lowest(rewards)
    is_best = shifted == groups.highest(shifted)
    second = groups.highest(np.where(is_best, 0.0, shifted))
    gap = np.where(is_best & (groups.sum(is_best.astype(np.float64)) == 1), shifted - second, 0.0)
    if scale == "group":
        gap /= groups.members(_divisor(_deviations(shifted - groups.mean(shifted), groups, 1) + std_eps))
    return _column(gap, rewards_B)


@checked
def decoupled_normalization(
    reward_components_BK: Tensor,
    groups_B: Tensor,
    *,
    reward_weights: list[float] | None = None,
    std_eps: float = 1e-6,
    ddof: Literal[0, 1] = 1,
    singleton: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """A_i = sum_k weight_k GRPO(component k)_i: each reward is normalised within the group before they are summed, so that
    none drowns another (GDPO, arXiv 2601.05242). `whiten` follows.

    reward_components_BK: [B, K]. reward_weights: one a component; None is 1 each. Returns float32 [B].
    """
    weights = [1.0] * reward_components_BK.shape[1] if reward_weights is None else reward_weights
    if len(weights) != reward_components_BK.shape[1]:
        raise ValueError(f"reward_weights has {len(weights)} entries for {reward_components_BK.shape[1]} reward components")
    total, groups = np.zeros(len(groups_B)), Groups(groups_B)
    for weight, rewards_B in zip(weights, reward_components_BK.unbind(1), strict=True):
        total += weight * _group_baseline(rewards_B, groups, "group", std_eps, ddof, False, singleton)
    return _column(total, reward_components_BK)


@checked
def soft_mean_centred(rewards_B: Tensor, *, soft_mean_beta: float = 1.0) -> Tensor:
    """c_i = R_i - (1 / beta) log mean exp(beta R) over the batch (online SPPO, arXiv 2405.00675): float32 [B]."""
    rewards = rewards_B.double()
    if not soft_mean_beta > 0:
        raise ValueError(f"soft_mean_beta must be positive, got {soft_mean_beta}")
    scaled = soft_mean_beta * rewards
    return (rewards - (torch.logsumexp(scaled, 0) - math.log(max(len(rewards), 1))) / soft_mean_beta).float()


def _shifted(rewards_B: Tensor, groups: Groups) -> Array:
    """[B]: rewards, but for a constant of their group, of which equal ones are exactly the mean.

    Multiples of a float32 are exact in float64, up to 2^29 times; what has float64's own precision is shifted by one of its group.
    """
    rewards = to_array(rewards_B)
    return rewards - groups.anchor(rewards) if rewards_B.dtype == torch.float64 else rewards


def _alone(rewards_B: Tensor, singleton: Literal["zero", "reward"]) -> Array:
    check_choice("singleton", singleton, ("zero", "reward"))
    rewards = to_array(rewards_B)
    return rewards if singleton == "reward" else np.zeros_like(rewards)


def _centred(values: Array) -> Array:
    """Less their mean; equal values give exactly 0."""
    shifted = values - values[:1]
    return shifted - shifted.sum() / max(len(values), 1)


def _divisor(scale: Array) -> Array:
    """`scale`, but 1 for 0, which is that of equal values: their differences, 0, stay 0."""
    return scale + (scale == 0)


def _column(values_B: Array, like: Tensor) -> Tensor:
    """[B] float32, where `like` is."""
    return torch.from_numpy(values_B.astype(np.float32)).to(like.device)


@checked
def spread(values_B: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """One value a row on each of its counted tokens, 0 elsewhere: [N] float32 or better."""
    return keep(on_tokens(values_B, lengths_B), mask_N, num_counted(mask_N))
