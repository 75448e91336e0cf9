"""Advantages: how much better an episode did than expected. Pure functions of the rewards of a whole batch.

Groups are told apart by id and never by position, and statistics count episodes: an episode that became several rows
is given once, and its advantage is spread over the sampled tokens of all of them afterwards (`spread`). Estimators
that need a critic or token rewards are not here.

Legend: B episodes, N packed tokens; R_i reward, g group of episode i, n its size.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from tandem.algos.terms import keep
from tandem.errors import NonFiniteError


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

    Rewards are shifted by the lowest of their group before anything else, so that equal rewards give exactly 0
    whatever their binary representation, and centred before they are squared.

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
    if leave_one_out and scale == "batch":
        raise ValueError("leave_one_out describes the group's statistics and scale=batch does not use its deviation; choose one")
    if not std_eps >= 0:
        raise ValueError(f"std_eps must not be negative, got {std_eps}")
    rewards = rewards_B.double()
    if len(bad := torch.nonzero(~torch.isfinite(rewards))):
        raise NonFiniteError(f"reward {float(rewards[bad[0]])} of episode {int(bad[0])} in the batch is not finite")
    if not len(rewards):
        return rewards.float()

    _, group_B = cast("tuple[Tensor, Tensor]", torch.unique(groups_B, return_inverse=True))
    num_groups = int(group_B.max()) + 1

    def total(values: Tensor) -> Tensor:
        """Over the group of each episode."""
        return values.new_zeros(num_groups).index_add_(0, group_B, values)[group_B]

    lowest = rewards.new_zeros(num_groups).scatter_reduce_(0, group_B, rewards, "amin", include_self=False)[group_B]
    shifted = rewards - lowest
    size = total(torch.ones_like(rewards))
    mean = total(shifted) / size
    centred = shifted - mean
    squares = total(centred**2)
    if leave_one_out:
        others = (size - 1).clamp(min=1)
        mean = mean - centred / others
        # Around the mean of the others: take out this episode's own square, then shift the centre. What rounding leaves of
        # equal others is not a deviation.
        of_others = squares - centred**2 - centred**2 / others
        squares = torch.where(of_others > 1e-12 * squares, of_others, 0.0)
        centred = shifted - mean
        size = others

    match scale:
        case "none":
            advantages = centred
        case "group":
            std = (squares / (size - ddof).clamp(min=1)).sqrt()
            divisor = torch.where(std > 0, std + std_eps, 1.0) if leave_one_out else std + std_eps
            advantages = _divided(centred, divisor)
        case "batch":
            spread_of_all = rewards - rewards.min()
            squares_of_all = ((spread_of_all - spread_of_all.mean()) ** 2).sum()
            advantages = _divided(centred, (squares_of_all / max(len(rewards) - ddof, 1)).sqrt() + std_eps)
    alone = total(torch.ones_like(rewards)) == 1
    return torch.where(alone, rewards if singleton == "reward" else 0.0, advantages).float()


def _divided(centred: Tensor, divisor: Tensor) -> Tensor:
    """0 stays 0 over any divisor, 0 included."""
    return torch.where(centred == 0, 0.0, centred / divisor)


def spread(values_B: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """One value a row on each of its counted tokens, 0 elsewhere: [N] float32 or better."""
    return keep(torch.repeat_interleave(values_B, lengths_B.to(values_B.device)), mask_N)
