"""Terms that are added to a policy loss: a pull towards a reference or a teacher, and imitation of what succeeded.

A row names them behind its policy loss, as in "ppo_clip+kl". A correction against the sampler's mismatch weighs policy
terms and none of these.

Legend: N packed tokens; x logprobs, o old_logprobs, b the sampler's.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algos.checks import keep
from tandem.algos.kl import KLEstimator, KLGradient, check_kl_in_loss, check_kl_target, kl_divergence
from tandem.algos.ratios import bounded, check, log_ratio
from tandem.algos.terms import LossInputs, TokenLoss, masked_mean
from tandem.types import Metric, Metrics


def kl_term(
    inputs: LossInputs,
    *,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_gradient: KLGradient = "direct",
    kl_target: float | None = None,
    kl_horizon: int = 10_000,
) -> TokenLoss:
    """Adds kl_coef times a KL estimate from column ref_logprobs, term "kl" (DeepSeekMath, arXiv 2402.03300, equation 4).

    Reads ref_logprobs and old_logprobs; nothing where kl_coef is 0. kl_estimator, kl_gradient: see kl.py. kl_target: the
    KL that an adaptive coefficient aims at; the row column kl_coef holds it then, kl_coef is its first value and
    kl_horizon the episodes over which it may change by a fifth (`adapted_kl_coef`). None is a fixed coefficient.
    """
    check(kl_coef >= 0, f"kl_coef must not be negative, got {kl_coef}: it would push the policy away from the reference")
    check_kl_target("kl", kl_coef, kl_target, kl_horizon)
    check_kl_in_loss(kl_estimator, kl_gradient)
    if not kl_coef:
        return TokenLoss({}, Metrics())
    coef = kl_coef if kl_target is None else inputs.row("kl_coef")
    return kl_estimate(inputs, "kl", "ref_logprobs", coef, kl_estimator, kl_gradient)


def distillation_term(
    inputs: LossInputs,
    *,
    distillation_coef: float = 1.0,
    distillation_estimator: KLEstimator = "k3",
    distillation_gradient: KLGradient = "direct",
    loss_clamp: float | None = None,
) -> TokenLoss:
    """Adds distillation_coef times an estimate of KL(policy, teacher), term "distillation" (on-policy distillation as a loss).

    Reads teacher_logprobs; estimators and gradients as for `kl_term`. loss_clamp: bounds the estimate of a token on either
    side, and gives it no gradient beyond (verl's loss_max_clamp); None is off.
    """
    check(distillation_coef >= 0, f"distillation_coef must not be negative, got {distillation_coef}")
    check_kl_in_loss(distillation_estimator, distillation_gradient)
    choices = (distillation_estimator, distillation_gradient)
    return kl_estimate(inputs, "distillation", "teacher_logprobs", distillation_coef, *choices, clamp=loss_clamp)


def kl_estimate(
    inputs: LossInputs,
    name: str,
    column: str,
    coef: float | Tensor,
    estimator: KLEstimator,
    gradient: KLGradient,
    *,
    clamp: float | None = None,
) -> TokenLoss:
    """Adds coef times an estimate of the KL from `column`, as term `name`: the formula of any estimator and gradient.

    clamp: bounds a token's estimate on either side; None is off. What is measured is not bounded.
    """
    old = inputs.token("old_logprobs") if gradient in ("unbiased", "weighted") else None
    kl = kl_divergence(inputs.policy_logprobs, inputs.token(column), estimator=estimator, gradient=gradient, old_logprobs_N=old)
    metric = {"kl": "kl_ref"}.get(name, f"kl_{name}")
    return TokenLoss({name: coef * bounded(kl, clamp)}, Metrics({metric: inputs.mean(kl)}))


def squared_log_ratio(inputs: LossInputs, *, kl_tau: float = 1e-3) -> TokenLoss:
    """Adds kl_tau (x - o)^2 on every counted token, term "log_ratio" (prime-rl, with o the sampler's logprobs)."""
    check(kl_tau >= 0, f"kl_tau must not be negative, got {kl_tau}")
    squared = log_ratio(inputs.policy_logprobs, inputs.token("old_logprobs"), None) ** 2
    return TokenLoss({"log_ratio": kl_tau * squared}, Metrics({"squared_log_ratio": inputs.mean(squared)}))


def positive_nll(inputs: LossInputs, *, positive_nll_weight: float = 0.1) -> TokenLoss:
    """Adds positive_nll_weight times the mean of -x over tokens of rows with R > 0, term "nll" (VAPO, arXiv 2504.05118).

    Reads rewards and the token column positive_scale, which makes loss_weights those of a mean over such tokens
    (`aggregation.mean_over`) and is computed, as they are, from a whole optimiser step.
    """
    check(positive_nll_weight >= 0, f"positive_nll_weight must not be negative, got {positive_nll_weight}")
    positive = inputs.mask & (inputs.row("rewards") > 0)
    loss = keep(-inputs.policy_logprobs, positive)
    metrics: dict[str, Metric] = {"nll_positive": masked_mean(loss, positive)}
    return TokenLoss({"nll": positive_nll_weight * inputs.token("positive_scale") * loss}, Metrics(metrics))


def reverse_kl_policy_gradient(
    inputs: LossInputs, *, trust_region_low: float = 0.2, log_ratio_clamp: float | None = 20.0
) -> TokenLoss:
    """-sg(teacher - x) r where exp(x) - exp(o) >= -trust_region_low, else 0, term "distillation" (prime-rl's ref_kl).

    old_logprobs are the sampler's. The policy gradient of the reverse KL to the teacher of column teacher_logprobs.
    """
    check(trust_region_low >= 0, f"trust_region_low must not be negative, got {trust_region_low}")
    x = inputs.policy_logprobs
    o = inputs.token("old_logprobs")
    near = x.detach().exp() - o.exp() >= -trust_region_low
    credit = inputs.token("teacher_logprobs") - x.detach()
    loss = -credit * keep(log_ratio(x, o, log_ratio_clamp).exp(), near)
    return TokenLoss({"distillation": loss}, Metrics({"kl_distillation": inputs.mean(-credit)}))
