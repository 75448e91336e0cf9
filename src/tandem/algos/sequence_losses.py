"""Policy losses of scope row: the whole response is one action, and its tokens share one ratio.

Rows are whole in every micro-batch, so their ratios do not depend on how a step is split. A loss of a row stands on each
of its counted tokens; with aggregation seq-mean-token-mean that is the mean over rows.

Legend: B rows, N packed tokens; x logprobs, o old_logprobs, A advantages, n_i counted tokens of row i, sg stop-gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tandem.algos.checks import keep
from tandem.algos.ratios import check, check_choice, check_clip, clamped, clipped_surrogate, log_ratio, policy_term, ratio_metrics
from tandem.algos.segments import on_tokens, row_mean, row_sum
from tandem.algos.terms import LossInputs, TokenLoss, whole_rows

MAX_LOG_RATIO = 10.0
"""The logarithm of the ratio of a sequence on a token, as GSPO-token has it, ends here."""


@whole_rows
def sequence_clip(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ratio: Literal["geometric", "product"] = "geometric",
    gradient: Literal["token", "sequence"] = "token",
    log_ratio_clamp: float | None = None,
) -> TokenLoss:
    """max(-A s_i, -A clip(s_i, 1 - clip_low, 1 + clip_high)), s_i = exp((1 / n_i) sum_t (x - o)) (GSPO, arXiv 2507.18071).

    ratio "product" leaves out 1 / n_i (the sequence's true ratio, TRL's RLOO). gradient "token" is GSPO-token:
    the value of s_i, up to e^10, with the gradient of x_t, so that token t is weighed by its own A_t; "sequence"
    differentiates s_i, which ends nowhere, so that every token gets the row's mean of A.
    Aggregated by seq-mean-token-sum it is LUSPO (TRL): long responses count for their length.
    """
    check_clip(clip_low, clip_high)
    check_choice("ratio", ratio, ("geometric", "product"))
    check_choice("gradient", gradient, ("token", "sequence"))
    x = inputs.policy_logprobs
    difference = log_ratio(x.detach() if gradient == "token" else x, inputs.token("old_logprobs"), log_ratio_clamp)
    reduce = row_mean if ratio == "geometric" else row_sum
    of_row = on_tokens(reduce(difference, inputs.mask, inputs.lengths), inputs.lengths)
    if gradient == "token":
        of_row = clamped(x - x.detach() + of_row, -math.inf, MAX_LOG_RATIO)
    ratio_N = of_row.exp()
    loss, clipped = clipped_surrogate(ratio_N, inputs.token("advantages"), clip_low, clip_high)
    return policy_term(inputs, loss, ratio_metrics(inputs, ratio_N, difference, clipped))


@whole_rows
def geometric_mean(
    inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4, log_ratio_clamp: float | None = 20.0
) -> TokenLoss:
    """-Abar_i exp((1 / n_i) sum_t c_t), Abar_i the row's mean of A (GMPO, arXiv 2507.20673).

    c is x - o clipped on one side: min(x - o, clip_high) where A > 0, max(x - o, -clip_low) elsewhere.
    """
    check(clip_low >= 0 and clip_high >= 0, f"clip_low={clip_low} and clip_high={clip_high} must not be negative")
    advantages = inputs.token("advantages")
    difference = log_ratio(inputs.policy_logprobs, inputs.token("old_logprobs"), log_ratio_clamp)
    above, below, rises = difference > clip_high, difference < -clip_low, advantages > 0
    clipped = (above & rises) | (below & ~rises)
    signed = torch.where(clipped, difference.detach().clamp(-clip_low, clip_high), difference)
    ratio_B = row_mean(signed, inputs.mask, inputs.lengths).exp()
    loss_B = -row_mean(advantages, inputs.mask, inputs.lengths) * ratio_B
    metrics = ratio_metrics(inputs, on_tokens(ratio_B, inputs.lengths), difference, clipped)
    metrics["outside_fraction_positive"] = inputs.mean((above | below) & rises)
    metrics["outside_fraction_negative"] = inputs.mean((above | below) & ~rises)
    return policy_term(inputs, _on_counted(loss_B, inputs), metrics)


@whole_rows
def variational_reinforce(
    inputs: LossInputs,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> TokenLoss:
    """-sg(phi) A x, log phi = lambda + k S - lambda e^S, S = clamp(sum_t (x - o), log 1e-8, 20) (VESPO, TRL).

    (k, lambda) are those of pos where A >= 0 and those of neg elsewhere; phi is 1 on policy and falls to either side of it.
    """
    for name, value in (("k_pos", k_pos), ("lambda_pos", lambda_pos), ("k_neg", k_neg), ("lambda_neg", lambda_neg)):
        check(value > 0, f"{name} must be positive, got {value}")
    advantages, x = inputs.token("advantages"), inputs.policy_logprobs
    difference = log_ratio(x.detach(), inputs.token("old_logprobs"), None)
    total_B = row_sum(difference, inputs.mask, inputs.lengths).clamp(math.log(1e-8), 20.0)
    total = on_tokens(total_B, inputs.lengths)

    def phi(k: float, lam: float) -> Tensor:
        return (lam + k * total - lam * total.exp()).exp()

    weight = torch.where(advantages >= 0, phi(k_pos, lambda_pos), phi(k_neg, lambda_neg))
    metrics = ratio_metrics(inputs, total.exp(), difference) | {"phi": inputs.mean(weight)}
    return policy_term(inputs, -weight * advantages * x, metrics)


@whole_rows
def squared_preference(inputs: LossInputs, *, eta: float = 1.0) -> TokenLoss:
    """(sum_t (x - o) - eta c_i)^2, c the soft-mean centred reward as the row's advantage (online SPPO, arXiv 2405.00675)."""
    check(eta > 0, f"eta must be positive, got {eta}")
    difference = log_ratio(inputs.policy_logprobs, inputs.token("old_logprobs"), None)
    total_B = row_sum(difference, inputs.mask, inputs.lengths)
    centred_B = row_mean(inputs.token("advantages"), inputs.mask, inputs.lengths)
    loss = _on_counted((total_B - eta * centred_B) ** 2, inputs)
    metrics = ratio_metrics(inputs, difference.exp(), difference)
    return policy_term(inputs, loss, metrics | {"log_ratio": inputs.mean(on_tokens(total_B, inputs.lengths))})


def _on_counted(values_B: Tensor, inputs: LossInputs) -> Tensor:
    return keep(on_tokens(values_B, inputs.lengths), inputs.mask)
