from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.algos.terms import TokenLoss
from tandem.algos.values import explained_variance, value_loss

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
        assert nothing.count == 0
