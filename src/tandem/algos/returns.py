"""Credit token by token: rewards placed on tokens, returns, critics, whitening. What it gives is a column, without gradient.

Masked tokens (observations, padding) are stepped over everywhere: they neither discount nor carry a reward. Statistics
are those of all rows given, which are a whole batch and never a part of one.

Legend: B rows, N packed tokens; r token rewards, V values, G returns, m mask, n_i counted tokens of row i.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.algos.checks import checked, keep, num_counted
from tandem.algos.kl import KLEstimator, check_kl_target, kl_divergence
from tandem.algos.ratios import check, check_choice
from tandem.algos.segments import Array, CountedTokens, Groups, on_tokens, row_max, row_mean, row_of_token, to_array


class Credit(NamedTuple):
    """advantages: [N], 0 where masked. returns: [N], what a critic learns from, 0 where masked."""

    advantages: Tensor
    returns: Tensor


@checked
def token_rewards(
    rewards_B: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    old_logprobs_N: Tensor | None = None,
    ref_logprobs_N: Tensor | None = None,
    reward_kl_coef_B: Tensor | None = None,
    *,
    reward_kl_coef: float = 0.0,
    reward_kl_estimator: KLEstimator = "k1",
    reward_kl_target: float | None = None,
    reward_kl_horizon: int = 10_000,
) -> Tensor:
    """r_t = R_i [t is the last counted token of row i] - reward_kl_coef k(old, ref)_t: [N], 0 where masked.

    KL in the reward (InstructGPT, arXiv 2203.02155): the penalty is earned token by token. reward_kl_target,
    reward_kl_horizon: of an adaptive coefficient, as for `extra_terms.kl_term`, which is that of each row then.
    """
    check(reward_kl_coef >= 0, f"reward_kl_coef must not be negative, got {reward_kl_coef}: it would pay for leaving the reference")
    check_kl_target("reward_kl", reward_kl_coef, reward_kl_target, reward_kl_horizon)
    rewards_N = keep(on_tokens(rewards_B, lengths_B), CountedTokens(mask_N, lengths_B).last())
    if not reward_kl_coef:
        return rewards_N
    assert old_logprobs_N is not None, "a KL penalty needs old_logprobs"
    assert ref_logprobs_N is not None, "a KL penalty needs ref_logprobs"
    coef: float | Tensor = reward_kl_coef
    if reward_kl_target is not None:
        assert reward_kl_coef_B is not None, "an adaptive KL penalty needs reward_kl_coef"
        coef = on_tokens(reward_kl_coef_B, lengths_B)
    return rewards_N - coef * kl_divergence(old_logprobs_N, ref_logprobs_N, estimator=reward_kl_estimator)


@checked
def discounted_returns(token_rewards_N: Tensor, mask_N: Tensor, lengths_B: Tensor, *, gamma: float = 1.0) -> Credit:
    """A_t = G_t = r_t + gamma G_(next counted t): REINFORCE, and with `whiten` REINFORCE++ (arXiv 2501.03262)."""
    returns = _discounted(token_rewards_N, CountedTokens(mask_N, lengths_B), _unit(gamma, "gamma"))
    return Credit(returns, returns)


@checked
def greedy_baseline(
    token_rewards_N: Tensor, reward_baselines_B: Tensor, mask_N: Tensor, lengths_B: Tensor, *, gamma: float = 1.0
) -> Credit:
    """A_t = G_t - R_greedy, G_t = r_t + gamma G_(next counted t) (ReMax, arXiv 2310.10505).

    reward_baselines_B: [B], the reward of the greedy answer to each row's prompt.
    """
    returns = _discounted(token_rewards_N, CountedTokens(mask_N, lengths_B), _unit(gamma, "gamma"))
    return Credit(keep(returns - on_tokens(reward_baselines_B, lengths_B), mask_N), returns)


@checked
def gae(
    token_rewards_N: Tensor, values_N: Tensor, mask_N: Tensor, lengths_B: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> Credit:
    """delta_t = r_t + gamma V_next - V_t; A_t = delta_t + gamma lam A_next; G = A + V (GAE, arXiv 1506.02438, equation 16).

    "next" is the next counted token of the row; behind the last one V and A are 0.
    """
    advantages = _gae(token_rewards_N, values_N, CountedTokens(mask_N, lengths_B), gamma, _unit(lam, "lam"))
    return Credit(advantages, advantages + values_N)


@checked
def turn_gae(
    token_rewards_N: Tensor,
    values_N: Tensor,
    turns_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Credit:
    """GAE with a turn as one action: r_k is the sum of the turn's rewards and V_k the value at its first token, so that
    delta_k = r_k + gamma V_(k+1) - V_k; A_k = delta_k + gamma lam A_(k+1); G_k = A_k + V_k on every token of turn k.

    turns_N: int [N], which turn of its row a counted token belongs to, rising in the row. gamma and lam are spent once a
    turn, however long it is.
    """
    row_M, turn_M = row_of_token(lengths_B)[mask_N], turns_N[mask_N]
    first_M = torch.ones_like(mask_N[mask_N])
    first_M[1:] = (row_M[1:] != row_M[:-1]) | (turn_M[1:] != turn_M[:-1])
    place_M = first_M.cumsum(0) - 1
    values_K = values_N[mask_N][first_M]
    rewards_K = torch.zeros_like(values_K).index_add(0, place_M, token_rewards_N[mask_N].to(values_K.dtype))
    turns_B = torch.bincount(row_M[first_M], minlength=len(lengths_B))
    of_turns = gae(rewards_K, values_K, torch.ones_like(values_K, dtype=torch.bool), turns_B, gamma=gamma, lam=lam)
    return Credit(*(torch.zeros_like(mask_N, dtype=each.dtype).masked_scatter(mask_N, each[place_M]) for each in of_turns))


@checked
def decoupled_gae(
    token_rewards_N: Tensor,
    values_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    gamma: float = 1.0,
    lam_value: float = 1.0,
    lam_policy: float | None = None,
    length_adaptive_alpha: float = 0.05,
) -> Credit:
    """GAE with one lambda for the critic's returns and one for the policy (VAPO, arXiv 2504.05118).

    lam_policy None is the length-adaptive 1 - 1 / (length_adaptive_alpha n_i), clamped to [0, 1], a row each.
    """
    if not length_adaptive_alpha > 0:
        raise ValueError(f"length_adaptive_alpha must be positive, got {length_adaptive_alpha}")
    counted = CountedTokens(mask_N, lengths_B)
    returns = _gae(token_rewards_N, values_N, counted, gamma, _unit(lam_value, "lam_value")) + values_N
    if lam_policy is None:
        counts_B = counted.counts.clamp(min=1).to(returns.dtype)
        policy: float | Tensor = (1 - 1 / (length_adaptive_alpha * counts_B)).clamp(0, 1)
    else:
        policy = _unit(lam_policy, "lam_policy")
    return Credit(_gae(token_rewards_N, values_N, counted, gamma, policy), returns)


def _gae(rewards_N: Tensor, values_N: Tensor, counted: CountedTokens, gamma: float, lam: float | Tensor) -> Tensor:
    values = counted.of(values_N)
    delta = counted.of(rewards_N) + _unit(gamma, "gamma") * counted.next(values) - values
    return counted.back(counted.discounted_sums(delta, gamma * lam))


@checked
def process_rewards(prm_logprobs_N: Tensor, ref_logprobs_N: Tensor, mask_N: Tensor, *, implicit_beta: float = 0.05) -> Tensor:
    """implicit_beta (prm - ref) on each counted token: what an implicit process reward model pays (arXiv 2412.01981)."""
    check(implicit_beta > 0, f"implicit_beta must be positive, got {implicit_beta}")
    return implicit_beta * (prm_logprobs_N - ref_logprobs_N)


def _discounted(rewards_N: Tensor, counted: CountedTokens, gamma: float) -> Tensor:
    return counted.back(counted.discounted_sums(counted.of(rewards_N), gamma))


@checked
def process_and_outcome(
    process_rewards_N: Tensor,
    rewards_B: Tensor,
    groups_B: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    process_coef: float = 5.0,
    outcome_coef: float = 5.0,
) -> Credit:
    """Leave-one-out over rows for a dense process reward and for the outcome, summed (PRIME, arXiv 2502.01456).

    For each source r with mask s (the process on counted tokens, the outcome on a row's last one), n rows with a counted token
    in group g:
    mu_i = mean_s r, b_g = sum_(j in g) mu_j / (n - 1), v_t = coef (r_t n / (n - 1) - b_g) where s; A_t = G_t = sum_(k >= t) v_k.
    `whiten` follows. A row without companions has no baseline and gets 0.
    """
    check(process_coef >= 0, f"process_coef must not be negative, got {process_coef}")
    check(outcome_coef >= 0, f"outcome_coef must not be negative, got {outcome_coef}")
    counted, groups = CountedTokens(mask_N, lengths_B), Groups(groups_B)
    has_tokens = to_array(counted.counts) > 0
    num_B = groups.sum(has_tokens.astype(np.float64))
    others = np.maximum(num_B - 1, 1)

    def of_rows(values_B: Array) -> Tensor:
        return on_tokens(torch.from_numpy(values_B).to(process_rewards_N), lengths_B)

    total = torch.zeros_like(process_rewards_N)
    sources = (
        (process_coef, process_rewards_N, mask_N),
        (outcome_coef, on_tokens(rewards_B, lengths_B), counted.last()),
    )
    for coef, source_N, where_N in sources:
        # The lowest of the group is taken out first, so that equal ones give exactly 0.
        lowest_B = groups.lowest(np.where(has_tokens, -to_array(row_max(-source_N, where_N, lengths_B)), np.inf))
        shifted_N = keep(source_N - of_rows(lowest_B), where_N)
        baseline_B = groups.sum(to_array(row_mean(shifted_N, where_N, lengths_B))) / others
        value_N = coef * (shifted_N * of_rows(num_B / others) - of_rows(baseline_B))
        total = total + keep(value_N, where_N & (of_rows(num_B) > 1))
    returns = _discounted(total, counted, 1.0)
    return Credit(returns, returns)


@checked
def optimal_token_baseline(
    token_rewards_N: Tensor,
    old_logprobs_N: Tensor,
    sum_pi_squared_N: Tensor,
    groups_B: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    baseline_eps: float = 1e-8,
    singleton: Literal["zero", "reward"] = "zero",
) -> Credit:
    """A_t = G_t - B_t, B_t = sum_(j in g) G_j W_j / (sum_(j in g) W_j + baseline_eps) at the same position (verl's OTB).

    W_t is the sum over k <= t of 1 - 2 exp(old_k) + sum_pi_squared_k, the squared length of the score so far, over
    the rows that reach the position. A position is the number of counted tokens before a token, so that observations between
    turns do not shift what is compared; verl counts masked tokens, too. Positions that only the longest row of a group
    reaches have B = 0.

    sum_pi_squared_N: [N], sum over the vocabulary of the policy's squared probabilities at each token.
    singleton: what a row without companions, which has no baseline, gets: 0 or its raw returns.
    """
    check_choice("singleton", singleton, ("zero", "reward"))
    check(baseline_eps >= 0, f"baseline_eps must not be negative, got {baseline_eps}")
    counted = CountedTokens(mask_N, lengths_B)
    returns_M = counted.discounted_sums(counted.of(token_rewards_N), 1.0)
    step_M = counted.of(1 - 2 * old_logprobs_N.exp() + sum_pi_squared_N)
    # The baseline couples rows at equal positions, so this one goes through [B, T].
    width = int(counted.counts.max()) if len(counted.counts) else 0
    inside_BT = torch.arange(width, device=mask_N.device) < counted.counts[:, None]
    returns_BT = returns_M.new_zeros(inside_BT.shape).masked_scatter(inside_BT, returns_M)
    weight_BT = step_M.new_zeros(inside_BT.shape).masked_scatter(inside_BT, step_M).cumsum(1) * inside_BT
    group_of_B = Groups(groups_B).index
    share_BB = torch.from_numpy(group_of_B[:, None] == group_of_B).to(returns_M)
    baseline_BT = share_BB @ (returns_BT * weight_BT) / (share_BB @ weight_BT + baseline_eps)
    reached_BT = share_BB @ inside_BT.to(share_BB.dtype) > 1
    advantages_M = returns_M - torch.where(reached_BT, baseline_BT, 0.0)[inside_BT]
    if singleton == "zero":
        has_companions = share_BB @ (counted.counts > 0).to(share_BB.dtype) > 1
        advantages_M = keep(advantages_M, on_tokens(has_companions, counted.counts))
    return Credit(counted.back(advantages_M), counted.back(returns_M))


@checked
def reverse_kl(
    advantages_N: Tensor, old_logprobs_N: Tensor, teacher_logprobs_N: Tensor, mask_N: Tensor, *, distillation_coef: float = 1.0
) -> Tensor:
    """A_t - distillation_coef (old_t - teacher_t): distillation on top of a reward (MOPD, arXiv 2601.02780)."""
    check(distillation_coef >= 0, f"distillation_coef must not be negative, got {distillation_coef}")
    return advantages_N - distillation_coef * (old_logprobs_N - teacher_logprobs_N)


@checked
def teacher_advantage(
    old_logprobs_N: Tensor, teacher_logprobs_N: Tensor, mask_N: Tensor, *, advantage_clamp: float | None = None
) -> Tensor:
    """A_t = teacher_t - old_t, the reverse KL per token with gamma 0 (Thinking Machines, On-Policy Distillation, 2025).

    advantage_clamp: bounds it on either side; None is off.
    """
    check(advantage_clamp is None or advantage_clamp > 0, f"advantage_clamp must be positive (None is off), got {advantage_clamp}")
    advantages = (teacher_logprobs_N - old_logprobs_N).detach()
    return advantages if advantage_clamp is None else advantages.clamp(-advantage_clamp, advantage_clamp)


@checked
def whiten(
    advantages_N: Tensor, mask_N: Tensor, *, whiten_ddof: Literal[0, 1] = 1, whiten_eps: float = 1e-8, whiten_std: bool = True
) -> Tensor:
    """(A - mean) / sqrt(var + whiten_eps) over all counted tokens of the batch: [N], 0 where masked.

    whiten_ddof: the variance's denominator is the count less this. whiten_std: False subtracts the mean only.
    Sums are in float64. Equal values give 0; a single token has no variance and gives 0 too.
    """
    check(whiten_eps >= 0, f"whiten_eps must not be negative, got {whiten_eps}")
    num = num_counted(mask_N)
    if not num:
        return advantages_N
    mean = _sum(advantages_N) / num
    mean += _sum(keep(advantages_N - mean, mask_N, num)) / num  # now equal values have exactly their own value as mean
    centred = keep(advantages_N - mean, mask_N, num)
    if not whiten_std:
        return centred
    variance = _sum(centred**2) / max(num - whiten_ddof, 1)
    return centred / math.sqrt(variance + whiten_eps)


def _sum(values_N: Tensor) -> float:
    return values_N.sum(dtype=torch.float64).item()


def _unit(value: float, name: str) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")
    return value
