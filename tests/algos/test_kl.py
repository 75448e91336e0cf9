"""The arithmetic of single tokens. What the estimators are on average is in test_unbiased.py."""

from __future__ import annotations

import pytest
import torch

from tandem.algos.kl import KLGradient, kl_divergence


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
