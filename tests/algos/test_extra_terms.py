from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tandem.algos.extra_terms import distillation_term, kl_term, positive_nll, reverse_kl_policy_gradient, squared_log_ratio
from tandem.algos.terms import LossInputs, TokenLoss

MASK, LENGTHS = torch.tensor([True, False, True, True]), torch.tensor([3, 1])
X, OLD = torch.tensor([-1.0, 5.0, -2.0, -0.5]), torch.tensor([-1.5, 5.0, -1.0, -0.5])
OTHER = torch.tensor([-2.0, 5.0, -1.5, -0.5])


def inputs(**columns: Any) -> LossInputs:
    given = {"old_logprobs": OLD, "ref_logprobs": OTHER, "teacher_logprobs": OTHER} | columns
    return LossInputs(X.clone().requires_grad_(), MASK, LENGTHS, given)


def gradient(given: LossInputs, loss: TokenLoss) -> list[float]:
    (found,) = torch.autograd.grad(loss.loss.sum(), given.logprobs)
    return found.tolist()


@pytest.mark.parametrize(
    ("term", "name", "metric"), [(kl_term, "kl", "kl_ref"), (distillation_term, "distillation", "kl_distillation")]
)
def test_an_estimate_of_the_kl_is_added(term: Any, name: str, metric: str) -> None:
    """X - ref: 1, -0.5, 0. k3 is exp(-d) - 1 + d, k2 d^2 / 2."""
    prefix = "kl" if name == "kl" else name
    given = inputs()
    loss = term(given, **{f"{prefix}_coef": 2.0})
    k3 = [math.exp(-1), 0, math.exp(0.5) - 1.5, 0]
    assert loss.terms.keys() == {name}
    assert loss.loss.tolist() == pytest.approx([2 * value for value in k3], abs=1e-6)
    assert loss.metrics.values_by_name() == {metric: pytest.approx(sum(k3) / 3)}
    assert gradient(given, loss) == pytest.approx([2 * (1 - math.exp(-1)), 0, 2 * (1 - math.exp(0.5)), 0], abs=1e-6)
    k2 = term(given, **{f"{prefix}_coef": 2.0, f"{prefix}_estimator": "k2"})
    assert k2.loss.tolist() == [1.0, 0, 0.25, 0]
    weighted = term(given, **{f"{prefix}_coef": 1.0, f"{prefix}_estimator": "k1", f"{prefix}_gradient": "weighted"})
    assert weighted.loss.tolist() == pytest.approx([math.exp(0.5), 0, -0.5 * math.exp(-1), 0])
    unbiased = term(given, **{f"{prefix}_coef": 1.0, f"{prefix}_estimator": "k1", f"{prefix}_gradient": "unbiased"})
    assert unbiased.loss.tolist() == pytest.approx([1.0, 0, -0.5, 0])
    assert gradient(given, unbiased) == pytest.approx([math.exp(0.5), 0, -0.5 * math.exp(-1), 0])
    with pytest.raises(ValueError, match="does not work inside a loss"):
        term(given, **{f"{prefix}_coef": 1.0, f"{prefix}_estimator": "k1", f"{prefix}_gradient": "direct"})


def test_a_clamped_distillation_keeps_what_is_measured() -> None:
    """k2 of x - teacher: 0.5, 0.125, 0; the first is above the bound, and is left without gradient."""
    given = inputs()
    loss = distillation_term(given, distillation_coef=2.0, distillation_estimator="k2", loss_clamp=0.25)
    assert loss.loss.tolist() == [0.5, 0, 0.25, 0]
    assert gradient(given, loss) == [0, 0, -1.0, 0]
    assert loss.metrics.values_by_name() == {"kl_distillation": pytest.approx(0.625 / 3)}
    below = distillation_term(inputs(), distillation_estimator="k1", distillation_gradient="straight_through", loss_clamp=0.25)
    assert below.loss.tolist() == [0.25, 0, -0.25, 0]


def test_a_coefficient_of_zero_reads_nothing() -> None:
    nothing = kl_term(LossInputs(X, MASK, LENGTHS, {}), kl_coef=0.0)
    assert (dict(nothing.terms), nothing.metrics.values_by_name()) == ({}, {})


def test_the_squared_log_ratio() -> None:
    given = inputs()
    loss = squared_log_ratio(given, kl_tau=0.5)
    assert loss.terms["log_ratio"].tolist() == [0.125, 0, 0.5, 0]
    assert gradient(given, loss) == [0.5, 0, -1, 0]
    assert loss.metrics["squared_log_ratio"].value == pytest.approx(1.25 / 3)


def test_imitation_of_what_succeeded() -> None:
    given = inputs(rewards=torch.tensor([1.0, 0.0]), positive_scale=torch.tensor([2.0, 7.0, 2.0, 2.0]))
    loss = positive_nll(given, positive_nll_weight=0.25)
    assert loss.terms["nll"].tolist() == [0.5, 0, 1.0, 0]
    assert gradient(given, loss) == [-0.5, 0, -0.5, 0]
    assert (loss.metrics["nll_positive"].value, loss.metrics["nll_positive"].count) == (1.5, 2)


def test_the_policy_gradient_of_the_reverse_kl() -> None:
    """P - q: 0.1447, -0.2325, 0. Credit teacher - x: -1, 0.5, 0; ratios exp(0.5), exp(-1), 1."""
    given = inputs()
    loss = reverse_kl_policy_gradient(given, trust_region_low=0.25)
    want = [math.exp(0.5), 0, -0.5 * math.exp(-1), 0]
    assert loss.terms["distillation"].tolist() == pytest.approx(want)
    assert gradient(given, loss) == pytest.approx(want)
    assert loss.metrics.values_by_name() == {"kl_distillation": pytest.approx((1 - 0.5) / 3)}
    near = reverse_kl_policy_gradient(given, trust_region_low=0.2)
    assert near.loss.tolist() == pytest.approx([math.exp(0.5), 0, 0, 0])
    same = reverse_kl_policy_gradient(inputs(old_logprobs=X), trust_region_low=0.0)
    assert same.loss.tolist() == [1.0, 0, -0.5, 0]
    clamped = reverse_kl_policy_gradient(given, trust_region_low=0.25, log_ratio_clamp=0.25)
    assert clamped.loss.tolist() == pytest.approx([math.exp(0.25), 0, -0.5 * math.exp(-0.25), 0])
