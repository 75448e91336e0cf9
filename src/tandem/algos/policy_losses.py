"""Policy losses: what a sampled token costs, given how good its episode was.

Each is a pure function of LossInputs; parameters are keyword-only, with defaults. Gates and weights against a mismatch
between sampler and trainer are not here.

Legend: B rows, N packed tokens; x logprobs, o old_logprobs, A advantages, r = exp(x - o).
"""

from __future__ import annotations

import torch

from tandem.algos.kl import KLEstimator, KLGradient, check_kl_in_loss, kl_divergence
from tandem.algos.terms import LossInputs, TokenLoss, keep, masked_mean
from tandem.types import Metric, Metrics


def ppo_clip(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_gradient: KLGradient = "direct",
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), plus kl_coef times a KL estimate (PPO, arXiv 1707.06347).

    Reads old_logprobs and advantages, and ref_logprobs where kl_coef is not 0.

    Args:
        inputs: whole rows.
        clip_low: how far below 1 the ratio still counts, in [0, 1].
        clip_high: how far above; larger than clip_low is DAPO's clip-higher (2503.14476).
        dual_clip: c > 1 bounds the loss of tokens with A < 0 by -A c (1912.09729); None is off.
        log_ratio_clamp: x - o is clamped to this, either side, before exp, and has no gradient beyond; None is off.
        kl_coef: weight of the term "kl".
        kl_estimator: see kl.py.
        kl_gradient: see kl.py.

    Returns:
        terms "policy" and, where kl_coef is not 0, "kl"; metrics over counted tokens.

    Raises:
        ValueError: a parameter out of range, or an estimator that does not work in a loss.
        ColumnError: a column that the batch lacks.
    """
    for good, complaint in (
        (0 <= clip_low <= 1, f"clip_low must be in [0, 1], got {clip_low}"),
        (clip_high >= 0, f"clip_high must not be negative, got {clip_high}"),
        (dual_clip is None or dual_clip > 1, f"dual_clip must be above 1 (None is off), got {dual_clip}"),
        (log_ratio_clamp is None or log_ratio_clamp > 0, f"log_ratio_clamp must be positive (None is off), got {log_ratio_clamp}"),
        (kl_coef >= 0, f"kl_coef must not be negative, got {kl_coef}: it would push the policy away from the reference"),
    ):
        if not good:
            raise ValueError(complaint)

    mask = inputs.mask
    logprobs, old, advantages = inputs.policy_logprobs, inputs.token("old_logprobs"), inputs.token("advantages")
    log_ratio = logprobs - old
    if log_ratio_clamp is not None:
        log_ratio = log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    metrics = {
        "ratio": masked_mean(ratio, mask),
        "ratio_max": Metric(float(keep(ratio.detach(), mask).max()) if len(ratio) else 0.0, reduction="max"),
        "clip_fraction": masked_mean((clipped > unclipped).float(), mask),
        "kl_old_new": masked_mean(-log_ratio, mask),
    }
    if dual_clip is not None:
        bound = -advantages * dual_clip
        metrics["dual_clip_fraction"] = masked_mean(((advantages < 0) & (loss > bound)).float(), mask)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    if inputs.entropy is not None:
        metrics["entropy"] = masked_mean(inputs.entropy, mask)
    terms = {"policy": keep(loss, mask)}
    if kl_coef:
        check_kl_in_loss(kl_estimator, kl_gradient)
        kl = kl_divergence(logprobs, inputs.token("ref_logprobs"), estimator=kl_estimator, gradient=kl_gradient, old_logprobs_N=old)
        terms["kl"] = kl_coef * keep(kl, mask)
        metrics["kl_ref"] = masked_mean(kl, mask)
    return TokenLoss(terms, Metrics(metrics))
