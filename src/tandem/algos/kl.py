"""Estimators of the KL divergence from a reference, per sampled token, and their gradients.

d = logprobs - ref_logprobs (policy less reference): k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
(Schulman, http://joschu.net/blog/kl-approx.html). An estimator whose value is unbiased need not have an unbiased
gradient: `gradient` names what is differentiated.

Legend: N packed tokens.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from tandem.algos.ratios import check_choice

KLEstimator = Literal["k1", "abs", "k2", "k3"]
KLGradient = Literal["direct", "straight_through", "unbiased", "weighted"]

DIFFERENCE_CLAMP = 20.0
"""k3 takes exp of d clamped to this, either side."""
K3_CLAMP = 10.0
"""k3 ends here; its gradient is 0 beyond."""
RATIO_CAP = 10.0
"""gradient="unbiased" weighs a token by at most this importance ratio."""


def kl_divergence(
    logprobs_N: Tensor,
    ref_logprobs_N: Tensor,
    *,
    estimator: KLEstimator = "k3",
    gradient: KLGradient = "direct",
    old_logprobs_N: Tensor | None = None,
) -> Tensor:
    """The estimator of each token, [N].

    gradient: "direct" differentiates the estimator; "straight_through" differentiates k2, whose expected gradient on
    policy is the KL's; "unbiased" is min(ratio, 10) d grad(logprobs); "weighted" multiplies the estimator by the
    differentiable ratio exp(logprobs - old_logprobs), in value too (DeepSeek-V3.2). The last two read old_logprobs_N.
    """
    check_choice("estimator", estimator, get_args(KLEstimator))
    check_choice("gradient", gradient, get_args(KLGradient))
    difference = logprobs_N - ref_logprobs_N
    match estimator:
        case "k1":
            value = difference
        case "abs":
            value = difference.abs()
        case "k2":
            value = difference**2 / 2
        case "k3":
            negative = (-difference).clamp(-DIFFERENCE_CLAMP, DIFFERENCE_CLAMP)
            value = (negative.exp() - negative - 1).clamp(-K3_CLAMP, K3_CLAMP)
    if gradient == "direct":
        return value
    if gradient == "straight_through":
        return _with_gradient_of(value, difference**2 / 2)
    assert old_logprobs_N is not None, f"gradient={gradient} needs old_logprobs"
    ratio = (logprobs_N - old_logprobs_N).clamp(-DIFFERENCE_CLAMP, DIFFERENCE_CLAMP).exp()
    if gradient == "weighted":
        return ratio * value
    return _with_gradient_of(value, (ratio.clamp(max=RATIO_CAP) * difference).detach() * logprobs_N)


def _with_gradient_of(value: Tensor, surrogate: Tensor) -> Tensor:
    return value.detach() + surrogate - surrogate.detach()


def check_kl_in_loss(estimator: KLEstimator, gradient: KLGradient) -> None:
    """Raises ValueError for an estimator whose gradient does not pull the policy towards the reference."""
    if gradient == "direct" and estimator in ("k1", "abs"):
        raise ValueError(
            f"kl_estimator={estimator} does not work inside a loss: on policy, the expected gradient of k1 is zero and that of abs "
            f"is not the KL's; use kl_estimator=k3 or k2, or kl_gradient=straight_through"
        )


def check_kl_target(name: str, coef: float, target: float | None, horizon: int) -> None:
    """Raises ValueError for an adaptive coefficient that could not adapt. target None is a fixed coefficient.

    name: what the names of its parameters begin with, as in NAME_target.
    """
    if horizon < 1:
        raise ValueError(f"{name}_horizon must be at least 1, got {horizon}")
    if target is None:
        return
    if not target > 0:
        raise ValueError(f"{name}_target must be positive (None is a fixed coefficient), got {target}")
    if not coef > 0:
        raise ValueError(f"{name}_coef={coef} stays {coef} whatever {name}_target={target} is: begin with a positive one")


def adapted_kl_coef(coef: float, kl: float, *, target: float, horizon: int, num_steps: int) -> float:
    """The next coefficient, coef (1 + clip(kl / target - 1, -0.2, 0.2) num_steps / horizon) (Ziegler et al., arXiv 1909.08593).

    kl: measured over the last num_steps episodes. horizon: episodes over which the coefficient may change by a fifth.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_steps / horizon)
