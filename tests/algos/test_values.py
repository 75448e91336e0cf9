from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.algos.terms import LossInputs, TokenLoss
from tandem.algos.values import explained_variance, value_loss, value_term
from tandem.types import Metric

VALUES, OLD, RETURNS = (torch.tensor(each) for each in ([1.0, 3.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.5]))
MASK = torch.tensor([True, True, True, False])


def gradient(loss: TokenLoss, leaf: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss.loss.sum(), leaf)
    return found.tolist()


def test_half_the_square_and_its_gradient() -> None:
    values = VALUES.clone().requires_grad_()
    loss = value_loss(values, OLD, RETURNS, MASK, value_clip=None)
    assert loss.terms["value"].tolist() == [0.5, 2.0, 4.5, 0.0]
    assert gradient(loss, values) == [1.0, 2.0, -3.0, 0.0]
    metrics = loss.metrics.values_by_name()
    assert metrics == {"value": pytest.approx(2 / 3), "value_error": pytest.approx((1 + 4 + 9) / 3)}
    assert loss.metrics["value"].count == 3


def test_a_value_that_moved_too_far_costs_the_larger_of_both_errors() -> None:
    """Clipped to 0.5 either side of the old value: errors (0.5 - 0)^2, (0.5 - 1)^2, (-0.5 - 1)^2, none of them larger."""
    assert value_loss(VALUES, OLD, RETURNS, MASK).loss.tolist() == [0.5, 2.0, 4.5, 0.0]
    returns = torch.tensor([2.0, 3.0, -2.0, 0.0])
    values = VALUES.clone().requires_grad_()
    loss = value_loss(values, OLD, returns, MASK, value_clip=0.5, value_scale=1.0)
    assert loss.loss.tolist() == [1.5**2, 2.5**2, 1.5**2, 0.0]
    assert gradient(loss, values) == [0.0, 0.0, 0.0, 0.0]  # the clipped error has none
    assert loss.metrics["value_clip_fraction"].value == 1
    assert value_loss(VALUES, OLD, RETURNS, MASK).metrics["value_clip_fraction"].value == 0
    inside = value_loss(VALUES, VALUES + 0.25, returns, MASK, value_clip=0.5)
    assert inside.metrics["value_clip_fraction"].value == 0  # equal is not clipped


def test_huber_doubled_is_the_square_within_delta_and_linear_beyond() -> None:
    """2 delta (|d| - delta / 2), times value_scale 0.5."""
    values = VALUES.clone().requires_grad_()
    loss = value_loss(values, OLD, RETURNS, MASK, value_clip=None, huber_delta=1.5)
    assert loss.loss.tolist() == [0.5, 1.5 * (2 - 0.75), 1.5 * (3 - 0.75), 0.0]
    assert gradient(loss, values) == [1.0, 1.5, -1.5, 0.0]


def test_what_is_masked_reaches_neither_loss_nor_gradient() -> None:
    dirty = [torch.where(MASK, column, torch.nan) for column in (VALUES, OLD, RETURNS)]
    values = dirty[0].clone().requires_grad_()
    loss = value_loss(values, dirty[1], dirty[2], MASK)
    assert loss.loss.tolist() == value_loss(VALUES, OLD, RETURNS, MASK).loss.tolist()
    assert gradient(loss, values)[3] == 0


@pytest.mark.parametrize("wrong", [0.0, -0.5, math.nan])
def test_a_clip_that_is_not_positive(wrong: float) -> None:
    with pytest.raises(ValueError, match="value_clip must be positive"):
        value_loss(VALUES, OLD, RETURNS, MASK, value_clip=wrong)
    assert value_loss(VALUES, OLD, RETURNS, MASK, value_clip=1e-3).loss[0] == 0.5


def test_explained_variance_is_one_for_the_returns_and_zero_for_their_mean() -> None:
    returns, mask = torch.tensor([1.0, 3.0, 0.0, 2.0, 99.0]), torch.tensor([True, True, True, True, False])
    assert explained_variance(returns, returns, mask).value == 1
    assert explained_variance(torch.full((5,), 0.7), returns, mask).value == pytest.approx(0)
    assert explained_variance(torch.tensor([2.0, 2.0, 1.0, 1.0, 0.0]), returns, mask).value == pytest.approx(1 - 1.0 / 1.25)
    assert explained_variance(-returns, returns, mask).value == pytest.approx(-3)
    rounded = torch.tensor([0.5, 0.5 + 1e-7, 0.5, 0.5, 0.0])
    for nothing in (explained_variance(returns, rounded, mask), explained_variance(returns, returns, mask & False)):
        assert nothing == Metric(0.0, 0.0)


def test_explained_variance_of_returns_that_vary_little() -> None:
    """In float64, since a variance of 1e-2 around 1e6 is nothing in float32; below 1e-10 it is rounding."""
    returns, mask = 1e6 + torch.tensor([0.0, 0.0625, 0.125, 0.25]), torch.ones(4, dtype=torch.bool)
    assert explained_variance(torch.full((4,), 1e6), returns, mask).value == pytest.approx(0, abs=1e-9)
    for size, count in ((1.2e-5, 1.0), (0.9e-5, 0.0)):
        assert explained_variance(torch.zeros(2), torch.tensor([size, -size]), mask[:2]).count == count
    side = 8e-8, (2e-10 - 8e-8**2) ** 0.5
    bound = torch.tensor([*side, *(-each for each in side)], dtype=torch.float64)
    assert bound.var(correction=0).item() == 1e-10, "the bound itself, which counts"
    assert explained_variance(torch.zeros(4), bound, mask).count == 1


def test_the_term_of_a_critic_is_the_loss_of_its_columns() -> None:
    columns = {"values": OLD + 0.25, "returns": RETURNS}
    for clip in (0.5, 0.1, None):
        leaf = VALUES.clone().requires_grad_()
        inputs = LossInputs(None, MASK, torch.tensor([4]), columns, values=leaf)
        found = value_term(inputs, value_clip=clip, value_scale=0.75)
        want = value_loss(VALUES, OLD + 0.25, RETURNS, MASK, value_clip=clip, value_scale=0.75)
        assert torch.equal(found.loss, want.loss)
        assert found.metrics == want.metrics
        (slope,) = torch.autograd.grad(found.loss.sum(), leaf)
        assert bool((slope[MASK] != 0).any())
