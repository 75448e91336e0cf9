"""Estimators on a toy softmax, where every expectation is a finite sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.algos.kl import KLEstimator, KLGradient, check_kl_in_loss, kl_divergence

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
REF = torch.tensor([-0.2, 0.4, 0.9, -0.5], dtype=torch.float64).log_softmax(0)


def expectation(estimator: KLEstimator, gradient: KLGradient) -> tuple[Tensor, Tensor]:
    """Of the estimator over tokens sampled from the policy itself, and of its gradient in the logits."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    kl = kl_divergence(logprobs, REF, estimator=estimator, gradient=gradient, old_logprobs_N=logprobs.detach())
    value = (logprobs.detach().exp() * kl).sum()
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


def exact() -> tuple[Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    value = (logprobs.exp() * (logprobs - REF)).sum()
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_in_value(estimator: KLEstimator) -> None:
    assert exact()[0] > 0
    torch.testing.assert_close(expectation(estimator, "direct")[0], exact()[0])


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [
        ("k2", "direct"),
        ("k1", "straight_through"),
        ("k3", "straight_through"),
        ("k3", "unbiased"),
        ("k1", "weighted"),
        ("k3", "weighted"),
    ],
)
def test_these_have_the_gradient_of_the_kl(estimator: KLEstimator, gradient: KLGradient) -> None:
    torch.testing.assert_close(expectation(estimator, gradient)[1], exact()[1])
    check_kl_in_loss(estimator, gradient)


def test_plain_k1_has_no_gradient_on_average_and_is_refused_in_a_loss() -> None:
    torch.testing.assert_close(expectation("k1", "direct")[1], torch.zeros_like(LOGITS))
    for estimator in ("k1", "abs"):
        with pytest.raises(ValueError, match="does not work inside a loss"):
            check_kl_in_loss(estimator, "direct")


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
