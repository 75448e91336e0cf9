"""The critic's loss, token by token.

Legend: N packed tokens; V values, G returns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from tandem.algos.checks import checked
from tandem.algos.ratios import check
from tandem.algos.terms import TokenLoss, masked_mean
from tandem.types import Metrics


@checked
def value_loss(
    values_N: Tensor,
    old_values_N: Tensor,
    returns_N: Tensor,
    mask_N: Tensor,
    *,
    value_clip: float | None = 0.5,
    value_scale: float = 0.5,
    huber_delta: float | None = None,
) -> TokenLoss:
    """value_scale max((V - G)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - G)^2), term "value" (PPO).

    Args:
        values_N: with gradient.
        old_values_N: the critic's values before the update.
        value_clip: how far V may move from V_old and still count; None is off.
        value_scale: a half, so that the gradient is V - G.
        huber_delta: in place of the square, Huber's loss doubled, which is linear beyond this; None is the square.
    """
    check(value_clip is None or value_clip > 0, f"value_clip must be positive (None is off), got {value_clip}")

    def error(value: Tensor) -> Tensor:
        if huber_delta is None:
            return (value - returns_N) ** 2
        return 2 * huber_loss(value, returns_N, reduction="none", delta=huber_delta)

    loss = error(values_N)
    metrics = {"value": masked_mean(values_N, mask_N), "value_error": masked_mean(loss, mask_N)}
    if value_clip is not None:
        clipped = error(old_values_N + (values_N - old_values_N).clamp(-value_clip, value_clip))
        metrics["value_clip_fraction"] = masked_mean(clipped > loss, mask_N)
        loss = torch.maximum(loss, clipped)
    return TokenLoss({"value": value_scale * loss}, Metrics(metrics))
