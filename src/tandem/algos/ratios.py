"""What policy losses share: importance ratios, the clipped surrogate, checks of their parameters, their common result.

Legend: N packed tokens; x logprobs, o old_logprobs, A advantages, r = exp(x - o).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.algos.checks import keep
from tandem.algos.terms import LossInputs, TokenLoss
from tandem.types import Metric, Metrics

CORRECTION = "correction"
"""Token column: what the policy term of a token is multiplied by, against a mismatch between sampler and trainer."""


def log_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor, clamp: float | None) -> Tensor:
    """The log-ratio x - o, [N], clamped to +-clamp with no gradient beyond; None does not clamp.

    clamp: what a function calls log_ratio_clamp. Raises ValueError unless it is positive and finite, or None.
    """
    check(clamp is None or 0 < clamp < math.inf, f"log_ratio_clamp must be positive and finite (None does not clamp), got {clamp}")
    difference = logprobs_N - old_logprobs_N
    return difference if clamp is None else clamped(difference, -clamp, clamp)


def clamped(values: Tensor, low: float, high: float) -> Tensor:
    """`values` in [low, high], without gradient beyond. Where none is beyond, which costs one look, nothing is done at all."""
    if not values.numel():
        return values
    least, greatest = (bound.item() for bound in values.detach().aminmax())
    return values if low <= least and greatest <= high else values.clamp(low, high)


def bounded(loss_N: Tensor, clamp: float | None) -> Tensor:
    """A loss in [-clamp, clamp] a token, without gradient beyond; None leaves it.

    clamp: what a function calls loss_clamp. Raises ValueError unless it is positive and finite, or None.
    """
    check(clamp is None or 0 < clamp < math.inf, f"loss_clamp must be positive and finite (None does not clamp), got {clamp}")
    return loss_N if clamp is None else loss_N.clamp(-clamp, clamp)


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where the clipped side is the larger one: [N], bool [N].

    The clipped side is larger only where r is outside the range, so it needs no gradient.
    """
    costs_N = -advantages_N
    unclipped = costs_N * ratio_N
    clipped = costs_N * ratio_N.detach().clamp(1 - clip_low, 1 + clip_high)
    is_clipped = clipped > unclipped.detach()
    return torch.where(is_clipped, clipped, unclipped), is_clipped


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raises ValueError for a clip range that makes no sense."""
    check(0 <= clip_low <= 1, f"clip_low must be in [0, 1], got {clip_low}")
    check(clip_high >= 0, f"clip_high must not be negative, got {clip_high}")


def check(good: bool, complaint: str) -> None:
    """Raises ValueError with `complaint` unless `good`."""
    if not good:
        raise ValueError(complaint)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`, which it lists."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; there are {', '.join(choices)}")


def policy_term(inputs: LossInputs, loss_N: Tensor, metrics: Mapping[str, Metric]) -> TokenLoss:
    """The term "policy" of these losses, times column `correction` where the batch has one; entropy joins the metrics."""
    if CORRECTION in inputs.columns:
        loss_N = inputs.token(CORRECTION) * loss_N
    found = dict(metrics)
    if inputs.entropy is not None:
        found["entropy"] = inputs.mean(inputs.entropy)
    return TokenLoss({"policy": loss_N}, Metrics(found))


def ratio_metrics(inputs: LossInputs, ratio_N: Tensor, log_ratio_N: Tensor, clipped_N: Tensor | None = None) -> dict[str, Metric]:
    """The mean ratio and its maximum, kl_old_new (the mean of o - x), clip_fraction where a loss clips.

    log_ratio_N: 0 where masked, as the difference of two columns is.
    """
    ratio_N, num = keep(ratio_N.detach(), inputs.mask, inputs.num_counted), float(inputs.num_counted)
    found = {
        "ratio": Metric(ratio_N.sum().item(), num),
        "ratio_max": Metric(ratio_N.amax().item() if len(ratio_N) else 0.0, reduction="max"),
        "kl_old_new": Metric(-log_ratio_N.detach().sum().item(), num),
    }
    return found if clipped_N is None else found | {"clip_fraction": inputs.mean(clipped_N)}
