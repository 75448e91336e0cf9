"""What policy losses share: importance ratios, the clipped surrogate, checks of their parameters, their common result.

Legend: N packed tokens; x logprobs, o old_logprobs, A advantages, r = exp(x - o).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.algos.terms import LossInputs, TokenLoss, keep, masked_mean
from tandem.types import Metric, Metrics

CORRECTION = "correction"
"""Token column: what the policy term of a token is multiplied by, against a mismatch between sampler and trainer."""


def log_ratio(inputs: LossInputs, clamp: float | None) -> Tensor:
    """The log-ratio x - o, [N], with gradient, clamped to +-clamp with no gradient beyond; None does not clamp."""
    difference = inputs.policy_logprobs - inputs.token("old_logprobs")
    return difference if clamp is None else difference.clamp(-clamp, clamp)


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where the clipped side is the larger one: [N], bool [N]."""
    unclipped = -advantages_N * ratio_N
    clipped = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def check_clip(clip_low: float, clip_high: float, log_ratio_clamp: float | None = None) -> None:
    """Raises ValueError for a clip range or a clamp that makes no sense."""
    check(0 <= clip_low <= 1, f"clip_low must be in [0, 1], got {clip_low}")
    check(clip_high >= 0, f"clip_high must not be negative, got {clip_high}")
    check(log_ratio_clamp is None or log_ratio_clamp > 0, f"log_ratio_clamp must be positive (None is off), got {log_ratio_clamp}")


def check(good: bool, complaint: str) -> None:
    """Raises ValueError with `complaint` unless `good`."""
    if not good:
        raise ValueError(complaint)


def policy_term(inputs: LossInputs, loss_N: Tensor, metrics: Mapping[str, Metric]) -> TokenLoss:
    """The term "policy" of these losses, times column `correction` where the batch has one; entropy joins the metrics."""
    if CORRECTION in inputs.columns:
        loss_N = inputs.token(CORRECTION) * loss_N
    found = dict(metrics)
    if inputs.entropy is not None:
        found["entropy"] = masked_mean(inputs.entropy, inputs.mask)
    return TokenLoss({"policy": keep(loss_N, inputs.mask)}, Metrics(found))


def ratio_metrics(inputs: LossInputs, ratio_N: Tensor, log_ratio_N: Tensor, clipped_N: Tensor | None = None) -> dict[str, Metric]:
    """The mean ratio and its maximum, kl_old_new (the mean of o - x), clip_fraction where a loss clips."""
    mask = inputs.mask
    found = {
        "ratio": masked_mean(ratio_N, mask),
        "ratio_max": Metric(float(keep(ratio_N.detach(), mask).max()) if len(ratio_N) else 0.0, reduction="max"),
        "kl_old_new": masked_mean(-log_ratio_N, mask),
    }
    if clipped_N is not None:
        found["clip_fraction"] = masked_mean(clipped_N.float(), mask)
    return found
