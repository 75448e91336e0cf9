"""Losses of whole rows by hand: a row of two counted tokens with a masked one between them, and a row of one."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from tandem.algos.sequence_losses import geometric_mean, sequence_clip, squared_preference, variational_reinforce
from tandem.algos.terms import LossInputs, TokenLoss, scope_of

MASK, LENGTHS = torch.tensor([True, False, True, True]), torch.tensor([3, 1])


def inputs(log_ratios: list[float], advantages: list[float]) -> LossInputs:
    old = torch.full((4,), -2.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    return LossInputs(logprobs, MASK, LENGTHS, {"old_logprobs": old, "advantages": torch.tensor(advantages, dtype=torch.float64)})


def gradient(given: LossInputs, loss: TokenLoss) -> list[float]:
    (found,) = torch.autograd.grad(loss.loss.sum(), given.logprobs)
    return found.tolist()


def close(values: Tensor | list[float], want: list[float]) -> None:
    found = values.tolist() if isinstance(values, Tensor) else values
    assert found == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_sequence_clip_takes_one_ratio_for_a_row() -> None:
    given = inputs([0.1, 9.0, 0.3, -0.5], [1.0, 9.0, 2.0, -1.0])
    geometric, product = math.exp(0.2), math.exp(0.4)
    loss = sequence_clip(given, clip_low=0.9, clip_high=9.0)
    close(loss.loss, [-geometric, 0, -2 * geometric, math.exp(-0.5)])
    close(gradient(given, loss), [-geometric, 0, -2 * geometric, math.exp(-0.5)])  # each token by its own advantage
    of_row = sequence_clip(given, clip_low=0.9, clip_high=9.0, gradient="sequence")
    close(of_row.loss, loss.loss.tolist())
    close(gradient(given, of_row), [-1.5 * geometric, 0, -1.5 * geometric, math.exp(-0.5)])  # by the mean
    close(sequence_clip(given, clip_low=0.9, clip_high=9.0, ratio="product").loss, [-product, 0, -2 * product, math.exp(-0.5)])
    metrics = loss.metrics.values_by_name()
    assert metrics == pytest.approx(
        {
            "ratio": (2 * geometric + math.exp(-0.5)) / 3,
            "ratio_max": geometric,
            "kl_old_new": (-0.1 - 0.3 + 0.5) / 3,
            "clip_fraction": 0,
        }
    )


def test_sequence_clip_clips() -> None:
    given = inputs([0.1, 9.0, 0.3, -0.5], [1.0, 9.0, 2.0, -1.0])
    loss = sequence_clip(given, clip_low=0.1, clip_high=0.1)
    close(loss.loss, [-1.1, 0, -2.2, 0.9])
    close(gradient(given, loss), [0, 0, 0, 0])
    assert loss.metrics["clip_fraction"].value == 1
    tight = sequence_clip(given, clip_low=0.9, clip_high=9.0, log_ratio_clamp=0.2)
    close(tight.loss, [-math.exp(0.15), 0, -2 * math.exp(0.15), math.exp(-0.2)])


def test_the_ratio_of_a_row_ends_at_exp_10() -> None:
    given = inputs([8.0, 0.0, 8.0, -12.0], [-1.0, 0.0, -1.0, 1.0])
    loss = sequence_clip(given, clip_low=1.0, clip_high=9.0, ratio="product")
    close(loss.loss, [math.exp(10), 0, math.exp(10), -math.exp(-12)])
    close(gradient(given, loss)[:3], [0, 0, 0])


@pytest.mark.parametrize(("ratio", "value", "share"), [("product", 12.0, 1.0), ("geometric", 12.0, 1 / 8)])
def test_a_ratio_that_is_differentiated_whole_has_no_cap(
    ratio: Literal["product", "geometric"], value: float, share: float
) -> None:
    """A = -1 on 8 tokens: the mean loss is r, and its gradient r on each token for a product, r / 8 for a geometric mean."""
    apart = value / 8 if ratio == "product" else value
    old = torch.full((8,), -1 - apart, dtype=torch.float64)
    logprobs, ones = torch.full_like(old, -1.0).requires_grad_(), torch.ones_like(old)
    given = LossInputs(logprobs, ones.bool(), torch.tensor([8]), {"old_logprobs": old, "advantages": -ones})
    mean = sequence_clip(given, clip_low=0.2, clip_high=0.2, ratio=ratio, gradient="sequence").loss.mean()
    (found,) = torch.autograd.grad(mean, logprobs)
    close(mean[None], [math.exp(value)])
    close(found, [math.exp(value) * share] * 8)


def test_geometric_mean_clips_each_token_on_the_side_of_its_advantage() -> None:
    given = inputs([0.6, 9.0, 0.1, -0.6], [1.0, 9.0, 3.0, -1.0])
    loss = geometric_mean(given, clip_low=0.4, clip_high=0.4)
    row = 2 * math.exp((0.4 + 0.1) / 2)  # the mean advantage is 2
    close(loss.loss, [-row, 0, -row, math.exp(-0.4)])
    close(gradient(given, loss), [0, 0, -row, 0])  # of both tokens' losses
    metrics = loss.metrics.values_by_name()
    assert metrics == pytest.approx(
        {
            "ratio": (2 * math.exp(0.25) + math.exp(-0.4)) / 3,
            "ratio_max": math.exp(0.25),
            "kl_old_new": (-0.6 - 0.1 + 0.6) / 3,
            "clip_fraction": 2 / 3,
            "outside_fraction_positive": 1 / 3,
            "outside_fraction_negative": 1 / 3,
        }
    )
    other = geometric_mean(inputs([-0.6, 9.0, 0.1, 0.6], [1.0, 9.0, 3.0, -1.0]), clip_low=0.4, clip_high=0.4)
    row = 2 * math.exp((-0.6 + 0.1) / 2)
    close(other.loss, [-row, 0, -row, math.exp(0.6)])  # what leads the wrong way is not clipped
    assert other.metrics["clip_fraction"].value == 0
    assert (
        other.metrics["outside_fraction_positive"].value == other.metrics["outside_fraction_negative"].value == pytest.approx(1 / 3)
    )
    neutral = geometric_mean(inputs([0.6, 0.0, -0.6, 0.6], [0.0, 0.0, 0.0, 0.0]), clip_low=0.4, clip_high=0.4)
    assert neutral.metrics["outside_fraction_negative"].value == 1
    inside = geometric_mean(inputs([0.5, 0.0, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]), clip_low=0.5, clip_high=0.5)
    assert inside.metrics["outside_fraction_negative"].value == 0


def test_variational_reinforce_by_hand() -> None:
    """Phi = exp(lambda + k S - lambda e^S), S the sum over the row."""
    given = inputs([0.1, 9.0, 0.3, -0.5], [1.0, 9.0, 2.0, -1.0])
    loss = variational_reinforce(given, k_pos=2.0, lambda_pos=3.0, k_neg=1.5, lambda_neg=2.5)
    good = math.exp(3 + 2 * 0.4 - 3 * math.exp(0.4))
    bad = math.exp(2.5 + 1.5 * -0.5 - 2.5 * math.exp(-0.5))
    close(gradient(given, loss), [-good, 0, -2 * good, bad])
    close(loss.loss, [good * 1.9, 0, 2 * good * 1.7, bad * -2.5])
    metrics = loss.metrics.values_by_name()
    assert metrics["phi"] == pytest.approx((2 * good + bad) / 3)
    assert metrics["ratio"] == pytest.approx((2 * math.exp(0.4) + math.exp(-0.5)) / 3)
    assert metrics["kl_old_new"] == pytest.approx((-0.1 - 0.3 + 0.5) / 3)
    neutral = variational_reinforce(inputs([0.0] * 3 + [0.7], [0.0] * 4), k_pos=2.0, lambda_pos=3.0)
    phi = math.exp(3 + 1.4 - 3 * math.exp(0.7))
    assert neutral.metrics["phi"].value == pytest.approx((2 + phi) / 3)  # an advantage of 0 is one of pos


def test_variational_reinforce_far_from_the_old_policy() -> None:
    far = variational_reinforce(inputs([-20.0, 0.0, -20.0, 15.0], [1.0, 0.0, 1.0, 1.0]), k_pos=0.1, lambda_pos=1e-9)
    smallest = math.exp(0.1 * math.log(1e-8))
    assert far.metrics["phi"].value == pytest.approx((2 * smallest + math.exp(1.5 - 1e-9 * math.exp(15))) / 3, rel=1e-4)
    high = variational_reinforce(inputs([15.0, 0.0, 15.0, 0.0], [1.0, 0.0, 1.0, 1.0]), k_pos=0.1, lambda_pos=1e-9)
    assert high.metrics["phi"].value == pytest.approx((2 * math.exp(2 - 1e-9 * math.exp(20)) + 1) / 3, rel=1e-4)


def test_squared_preference_by_hand() -> None:
    given = inputs([0.1, 9.0, 0.3, -0.5], [1.0, 9.0, 2.0, -1.0])
    loss = squared_preference(given, eta=2.0)
    first, second = 0.4 - 2 * 1.5, -0.5 - 2 * -1
    close(loss.loss, [first**2, 0, first**2, second**2])
    close(gradient(given, loss), [4 * first, 0, 4 * first, 2 * second])  # both tokens carry the row's loss
    metrics = loss.metrics.values_by_name()
    assert metrics["log_ratio"] == pytest.approx((0.4 + 0.4 - 0.5) / 3)
    assert metrics["ratio"] == pytest.approx((math.exp(0.1) + math.exp(0.3) + math.exp(-0.5)) / 3)
    assert metrics["kl_old_new"] == pytest.approx((-0.1 - 0.3 + 0.5) / 3)


def test_all_treat_a_row_as_one() -> None:
    assert {scope_of(loss) for loss in (sequence_clip, geometric_mean, variational_reinforce, squared_preference)} == {"row"}
