"""Policy losses of scope token: what a sampled token costs, given how good its episode was.

Each is a pure function of LossInputs that reads old_logprobs and advantages, with keyword-only parameters. Losses of
scope row are in sequence_losses.py, terms that are added to them in extra_terms.py, corrections of the mismatch between
sampler and trainer in corrections.py.

Legend: B rows, N packed tokens; x logprobs, o old_logprobs, A advantages, r = exp(x - o), sg stop-gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tandem.algos.checks import keep
from tandem.algos.ratios import check, check_choice, check_clip, clipped_surrogate, log_ratio, policy_term, ratio_metrics
from tandem.algos.terms import LossInputs, TokenLoss


def ppo_clip(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
    log_ratio_clamp: float | None = 20.0,
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (PPO, arXiv 1707.06347, equation 7).

    Args:
        inputs: whole rows.
        clip_low: how far below 1 the ratio still counts, in [0, 1].
        clip_high: how far above; larger than clip_low is DAPO's clip-higher (2503.14476).
        dual_clip: c > 1 bounds the loss of tokens with A < 0 by -A c (1912.09729); None is off.
        ratio_cap: the unclipped side takes min(r, ratio_cap) (TRL's delta, INTELLECT-2); None is off.
        log_ratio_clamp: x - o is clamped to this, either side, before exp, and has no gradient beyond; None is off.

    Returns:
        term "policy"; metrics over counted tokens.

    Raises:
        ValueError: a parameter out of range.
        ColumnError: a column that the batch lacks.
    """
    check_clip(clip_low, clip_high)
    check(dual_clip is None or dual_clip > 1, f"dual_clip must be above 1 (None is off), got {dual_clip}")
    check(ratio_cap is None or ratio_cap > 1 + clip_high, f"ratio_cap must be above 1 + clip_high, got {ratio_cap}")
    advantages = inputs.token("advantages")
    difference = log_ratio(inputs.policy_logprobs, inputs.token("old_logprobs"), log_ratio_clamp)
    ratio = difference.exp()
    capped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    loss, clipped = clipped_surrogate(capped, advantages, clip_low, clip_high)
    metrics = ratio_metrics(inputs, ratio, difference, clipped)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        metrics["dual_clip_fraction"] = inputs.mean((advantages < 0) & (loss > bound))
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return policy_term(inputs, loss, metrics)


def importance_weighted(inputs: LossInputs, *, log_ratio_clamp: float | None = 20.0) -> TokenLoss:
    """-A r, without any clip: the off-policy policy gradient with the ratio of each token (Tinker's importance_sampling)."""
    difference = log_ratio(inputs.policy_logprobs, inputs.token("old_logprobs"), log_ratio_clamp)
    ratio = difference.exp()
    return policy_term(inputs, -inputs.token("advantages") * ratio, ratio_metrics(inputs, ratio, difference))


def reinforce(inputs: LossInputs) -> TokenLoss:
    """-A x (Williams 1992): the score function's gradient; where x is not the sampler's it needs a correction. Reads advantages."""
    return policy_term(inputs, -inputs.token("advantages") * inputs.policy_logprobs, {})


def truncated_reinforce(
    inputs: LossInputs, *, ratio_low: float = 0.0, ratio_high: float = 1.0, log_ratio_clamp: float | None = 20.0
) -> TokenLoss:
    """-sg(clip(r, ratio_low, ratio_high)) A x: REINFORCE with a truncated importance weight (ROLL's reinforce_tis)."""
    check(0 <= ratio_low <= ratio_high, f"ratio_low={ratio_low} must be in [0, ratio_high={ratio_high}]")
    x = inputs.policy_logprobs
    difference = log_ratio(x.detach(), inputs.token("old_logprobs"), log_ratio_clamp)
    ratio = difference.exp()
    weight = ratio.clamp(ratio_low, ratio_high)
    metrics = ratio_metrics(inputs, ratio, difference, weight != ratio)
    return policy_term(inputs, -weight * inputs.token("advantages") * x, metrics)


def tapered_reinforce(inputs: LossInputs, *, log_ratio_clamp: float | None = 20.0) -> TokenLoss:
    """-A x where R > 0, else -sg(clip(r, 0, 1)) A x: only what failed is tapered (TOPR, arXiv 2503.14286).

    Reads the row column rewards too.
    """
    x = inputs.policy_logprobs
    difference = log_ratio(x.detach(), inputs.token("old_logprobs"), log_ratio_clamp)
    ratio = difference.exp()
    weight = torch.where(inputs.row("rewards") > 0, 1.0, ratio.clamp(0, 1))
    metrics = ratio_metrics(inputs, ratio, difference, weight != ratio)
    return policy_term(inputs, -weight * inputs.token("advantages") * x, metrics)


def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0, log_ratio_clamp: float | None = 20.0) -> TokenLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A x: no token loses its gradient (CISPO; MiniMax-M1, arXiv 2506.13585).

    clip_low 1 is no lower bound. The defaults are ScaleRL's (2510.13786).
    """
    check_clip(clip_low, clip_high)
    x = inputs.policy_logprobs
    difference = log_ratio(x.detach(), inputs.token("old_logprobs"), log_ratio_clamp)
    ratio = difference.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = ratio_metrics(inputs, ratio, difference, weight != ratio)
    return policy_term(inputs, -weight * inputs.token("advantages") * x, metrics)


def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05, log_ratio_clamp: float | None = 20.0) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg: a soft clip (SAPO, arXiv 2511.20347)."""
    check(tau_pos > 0 and tau_neg > 0, f"tau_pos and tau_neg must be positive, got {tau_pos} and {tau_neg}")
    advantages = inputs.token("advantages")
    difference = log_ratio(inputs.policy_logprobs, inputs.token("old_logprobs"), log_ratio_clamp)
    ratio = difference.exp()
    tau = torch.full_like(ratio, tau_neg).masked_fill_(advantages > 0, tau_pos)
    loss = -4 * advantages / tau * torch.sigmoid(tau * (ratio - 1))
    return policy_term(inputs, loss, ratio_metrics(inputs, ratio, difference))


def mirror_descent(inputs: LossInputs, *, dro_beta: float = 0.1) -> TokenLoss:
    """-A x + (dro_beta / 2) (x - o)^2: DRO, and the loss of Kimi k1.5 (arXiv 2501.12599, section 2.3.2) with tau = dro_beta."""
    check(dro_beta > 0, f"dro_beta must be positive, got {dro_beta}")
    x = inputs.policy_logprobs
    difference = log_ratio(x, inputs.token("old_logprobs"), None)
    loss = -inputs.token("advantages") * x + dro_beta / 2 * difference**2
    return policy_term(inputs, loss, ratio_metrics(inputs, difference.exp(), difference))


def dppo_tv(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    sides: Literal["outward", "both"] = "outward",
    surrogate: Literal["logprob", "ratio"] = "logprob",
    ratio_cap: float | None = 20.0,
    log_ratio_clamp: float | None = 20.0,
) -> TokenLoss:
    """-A sg(min(r, ratio_cap)) x where p = exp(x) and q = exp(o) are near, else 0 (DPPO with binary TV, arXiv 2602.04879).

    Near: p - q <= clip_high where A > 0, p - q >= -clip_low elsewhere (sides "outward"); both at once (sides "both").
    old_logprobs are the sampler's in the paper. surrogate "ratio" is -A min(r, ratio_cap); its gradient below the cap is the same.
    """
    check(clip_low >= 0 and clip_high >= 0, f"clip_low={clip_low} and clip_high={clip_high} must not be negative")
    check_choice("sides", sides, ("outward", "both"))
    moved = inputs.policy_logprobs.detach().exp() - inputs.token("old_logprobs").exp()
    up, down = moved <= clip_high, moved >= -clip_low
    near = up & down if sides == "both" else _by_sign(inputs.token("advantages"), up, down)
    return _gated(inputs, near, surrogate, ratio_cap, log_ratio_clamp)


def dppo_kl(
    inputs: LossInputs,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    surrogate: Literal["logprob", "ratio"] = "logprob",
    ratio_cap: float | None = 20.0,
    log_ratio_clamp: float | None = 20.0,
) -> TokenLoss:
    """As `dppo_tv`, gated by KL(q, p) = q (o - x) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8)) (DPPO, arXiv 2602.04879).

    Kept where KL <= clip_high (A > 0) or clip_low (elsewhere), or where the step leads back: p <= q (A > 0), p >= q (elsewhere).
    """
    check(clip_low >= 0 and clip_high >= 0, f"clip_low={clip_low} and clip_high={clip_high} must not be negative")
    x, o = inputs.policy_logprobs.detach(), inputs.token("old_logprobs")
    not_p, not_q = -x.expm1(), -o.expm1()  # 1 - p and 1 - q, exact where they are small
    divergence = (1 - not_q) * (o - x) + not_q * ((not_q + 1e-8) / (not_p + 1e-8)).log()
    rising, falling = (divergence <= clip_high) | (x <= o), (divergence <= clip_low) | (x >= o)
    return _gated(inputs, _by_sign(inputs.token("advantages"), rising, falling), surrogate, ratio_cap, log_ratio_clamp)


def _by_sign(advantages_N: Tensor, rising_N: Tensor, falling_N: Tensor) -> Tensor:
    """Bool [N]: `rising_N` where A > 0, `falling_N` elsewhere."""
    rises = advantages_N > 0
    return (rises & rising_N) | (~rises & falling_N)


def _gated(
    inputs: LossInputs,
    near_N: Tensor,
    surrogate: Literal["logprob", "ratio"],
    ratio_cap: float | None,
    log_ratio_clamp: float | None,
) -> TokenLoss:
    check_choice("surrogate", surrogate, ("logprob", "ratio"))
    check(ratio_cap is None or ratio_cap >= 1, f"ratio_cap must be at least 1 (None is off), got {ratio_cap}")
    x = inputs.policy_logprobs
    difference = log_ratio(x if surrogate == "ratio" else x.detach(), inputs.token("old_logprobs"), log_ratio_clamp)
    ratio = difference.exp()
    weight = keep(ratio if ratio_cap is None else ratio.clamp(max=ratio_cap), near_N)
    loss = -inputs.token("advantages") * (weight if surrogate == "ratio" else weight * x)
    return policy_term(inputs, loss, ratio_metrics(inputs, ratio, difference, ~near_N))


def kl_cov(inputs: LossInputs, *, cov_kl_coef: float = 1.0, log_ratio_clamp: float | None = 20.0) -> TokenLoss:
    """-A r, plus cov_kl_coef |x - o| on tokens whose logprob and advantage covary most (KL-Cov, arXiv 2505.22617).

    Reads the token column most_covariant (bool), which selection.py chooses from the whole batch.
    """
    check(cov_kl_coef >= 0, f"cov_kl_coef must not be negative, got {cov_kl_coef}")
    difference = log_ratio(inputs.policy_logprobs, inputs.token("old_logprobs"), log_ratio_clamp)
    ratio = difference.exp()
    penalty = torch.where(inputs.token("most_covariant") > 0, cov_kl_coef * difference.abs(), 0.0)
    metrics = ratio_metrics(inputs, ratio, difference) | {"abs_log_ratio": inputs.mean(difference.abs())}
    return policy_term(inputs, -inputs.token("advantages") * ratio + penalty, metrics)


def clip_cov(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, log_ratio_clamp: float | None = 20.0
) -> TokenLoss:
    """The clipped surrogate, and 0 on tokens drawn from those of high covariance (Clip-Cov, arXiv 2505.22617).

    Reads the token column random_covariant (bool), which selection.py draws from the whole batch.
    """
    check_clip(clip_low, clip_high)
    difference = log_ratio(inputs.policy_logprobs, inputs.token("old_logprobs"), log_ratio_clamp)
    ratio = difference.exp()
    loss, clipped = clipped_surrogate(ratio, inputs.token("advantages"), clip_low, clip_high)
    drawn = inputs.token("random_covariant") > 0
    return policy_term(inputs, torch.where(drawn, 0.0, loss), ratio_metrics(inputs, ratio, difference, clipped | drawn))
