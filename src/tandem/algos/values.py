"""The critic's loss, token by token.

Legend: N packed tokens; V values, G returns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from tandem.algos.ratios import check
from tandem.algos.terms import TokenLoss, keep, masked_mean
from tandem.types import Metrics


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
    values, old, returns = (keep(column, mask_N) for column in (values_N, old_values_N, returns_N))

    def error(value: Tensor) -> Tensor:
        if huber_delta is None:
            return (value - returns) ** 2
        return 2 * huber_loss(value, returns, reduction="none", delta=huber_delta)

    loss = error(values)
    metrics = {"value": masked_mean(values, mask_N), "value_error": masked_mean(loss, mask_N)}
    if value_clip is not None:
        clipped = error(old + (values - old).clamp(-value_clip, value_clip))
        metrics["value_clip_fraction"] = masked_mean((clipped > loss).float(), mask_N)
        loss = torch.maximum(loss, clipped)
    return TokenLoss({"value": keep(value_scale * loss, mask_N)}, Metrics(metrics))
