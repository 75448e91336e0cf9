"""The critic's loss, token by token, and how much of its returns it explains.

Legend: N packed tokens; V values, G returns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from tandem.algos.checks import checked
from tandem.algos.ratios import check
from tandem.algos.terms import LossInputs, TokenLoss, masked_mean
from tandem.types import Metric, Metrics

_ROUNDING = 1e-10  # of the variance of returns, each of which is an advantage and a value added up in float32


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
    check(value_scale > 0, f"value_scale must be positive, got {value_scale}")
    check(huber_delta is None or huber_delta > 0, f"huber_delta must be positive (None is the square), got {huber_delta}")
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


def value_term(
    inputs: LossInputs, *, value_clip: float | None = 0.5, value_scale: float = 0.5, huber_delta: float | None = None
) -> TokenLoss:
    """value_scale max((V - G)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - G)^2), term "value" (PPO): see `value_loss`.

    V is what the model gives; reads columns values (V_old) and returns (G).
    """
    old, returns = inputs.token("values"), inputs.token("returns")
    return value_loss(
        inputs.new_values, old, returns, inputs.mask, value_clip=value_clip, value_scale=value_scale, huber_delta=huber_delta
    )


def explained_variance(values_N: Tensor, returns_N: Tensor, mask_N: Tensor) -> Metric:
    """1 - Var(G - V) / Var(G) over the tokens that count: 1 where the critic knows the returns, 0 where it knows their mean.

    Nothing (a mean of no count) where the returns do not vary by more than rounding.
    """
    values, returns = values_N[mask_N].double(), returns_N[mask_N].double()
    spread = returns.var(correction=0).item() if len(returns) else 0.0
    if spread < _ROUNDING:
        return Metric(0.0, 0.0)
    return Metric(1 - (returns - values).var(correction=0).item() / spread)
