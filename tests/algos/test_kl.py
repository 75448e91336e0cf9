"""The arithmetic of single tokens. What the estimators are on average is in test_unbiased.py."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algos.kl import KLGradient, check_kl_target, kl_divergence


@pytest.mark.parametrize("gradient", ["direct", "straight_through", "unbiased"])
def test_the_way_of_differentiating_does_not_change_the_value(gradient: KLGradient) -> None:
    difference = torch.tensor([-30.0, -0.5, 0.0, 0.5, 30.0])
    for estimator in ("k1", "abs", "k2", "k3"):
        want = kl_divergence(difference, torch.zeros(5), estimator=estimator)
        got = kl_divergence(difference, torch.zeros(5), estimator=estimator, gradient=gradient, old_logprobs_N=difference)
        torch.testing.assert_close(got, want)


def test_k3_is_bounded_with_no_gradient_beyond() -> None:
    logprobs = torch.tensor([-50.0, -1.0, 0.0]).requires_grad_()
    kl = kl_divergence(logprobs, torch.tensor([0.0, -1.0, -50.0]))
    kl.sum().backward()
    assert kl.tolist() == [10.0, 0.0, 10.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


def test_equal_policies_have_exactly_zero() -> None:
    logprobs = torch.randn(100)
    for estimator in ("k1", "abs", "k2", "k3"):
        assert not bool(kl_divergence(logprobs, logprobs, estimator=estimator).any())


def test_k3_far_below_the_reference_has_a_gradient_of_zero_and_not_nan() -> None:
    """exp(200) is infinite in float32, and 0 times that is NaN."""
    logprobs = torch.tensor([-200.0]).requires_grad_()
    kl_divergence(logprobs, torch.zeros(1)).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0]


def test_the_weight_of_a_token_is_bounded() -> None:
    """Weighted: exp of at most 20, either side, without gradient beyond. Unbiased: min(ratio, 10)."""
    logprobs = torch.tensor([1.0, 30.0, -30.0, 4.0], dtype=torch.float64).requires_grad_()
    old, ref = torch.zeros(4, dtype=torch.float64), logprobs.detach() - 0.5
    weighted = kl_divergence(logprobs, ref, estimator="k1", gradient="weighted", old_logprobs_N=old)
    want = torch.tensor([1.0, 20.0, -20.0, 4.0], dtype=torch.float64).exp() / 2
    torch.testing.assert_close(weighted.detach(), want, rtol=1e-12, atol=0)
    unbiased = kl_divergence(logprobs, ref, estimator="k1", gradient="unbiased", old_logprobs_N=old)
    (found,) = torch.autograd.grad(unbiased.sum(), logprobs)
    want = [math.exp(1) / 2, 5.0, math.exp(-20) / 2, 5.0]
    assert found.tolist() == pytest.approx(want, rel=1e-9)


def test_what_an_adaptive_coefficient_begins_with() -> None:
    check_kl_target("kl", 0.0, None, 1)
    check_kl_target("kl", 0.1, 1e-3, 1)
    for coef, target, horizon, says in (
        (0.1, 0.0, 1, "kl_target must be positive"),
        (0.1, -1.0, 1, "kl_target must be positive"),
        (0.1, math.nan, 1, "kl_target must be positive"),
        (0.1, 1.0, 0, "kl_horizon must be at least 1"),
        (0.1, None, 0, "kl_horizon must be at least 1"),
        (0.0, 1.0, 1, r"kl_coef=0\.0 stays"),
        (math.nan, 1.0, 1, "kl_coef=nan stays"),
    ):
        with pytest.raises(ValueError, match=says):
            check_kl_target("kl", coef, target, horizon)
