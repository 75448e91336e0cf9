"""Which episodes are drawn anew: the draws by hand, and their shares."""

from __future__ import annotations

import pytest
import torch

from tandem.algos.shaping import (
    Resampling,
    overlong_penalty,
    resample_counts,
    resampling_probabilities,
    resampling_weights,
    stop_properly,
)


def counts(rewards: list[float], uniforms: list[float], method: Resampling = "pow", weight_pow: float = 2.0) -> list[float]:
    found = resample_counts(torch.tensor(rewards), torch.tensor(uniforms), method=method, weight_pow=weight_pow)
    assert found.dtype == torch.float32
    return found.tolist()


def test_a_draw_is_where_its_number_falls_among_the_shares() -> None:
    """Rewards 1, -2, 0 and 2 have shares of 1/9, 4/9, 0 and 4/9."""
    assert counts([1, -2, 0, 2], [0.0, 0.11, 0.12, 0.55]) == [2, 2, 0, 0]
    assert counts([1, -2, 0, 2], [0.56, 0.6, 0.999999, 0.2]) == [0, 1, 0, 3]
    assert counts([1, -2, 0, 2], [0.1, 0.3, 0.5, 0.9], weight_pow=1.0) == [1, 2, 0, 1]
    assert counts([1, -1], [0.0, 0.5]) == [1, 1], "a share begins with its lower end"
    assert counts([1, 0, 0, 0.5], [0.1, 0.3, 0.5, 0.9], "max_min") == [2, 1, 1, 0]
    assert counts([1, 0, 0, 0.5], [0.1, 0.6, 0.75, 0.9], "max_random") == [1, 1, 1, 1]


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_numbers_spread_evenly_give_each_episode_its_share_to_within_one_draw(method: Resampling) -> None:
    rewards = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.3
    even = (torch.arange(50) + 0.5) / 50
    shares = 50 * resampling_probabilities(resampling_weights(rewards, method=method))
    found = resample_counts(rewards, even, method=method)
    assert float(found.sum()) == 50
    assert float((found - shares).abs().max()) <= 1


def test_rewards_of_nothing_are_drawn_alike() -> None:
    assert counts([0, 0, 0, 0], [0.1, 0.3, 0.6, 0.9]) == [1, 1, 1, 1]


def test_weights_of_a_draw_by_hand() -> None:
    scores = torch.tensor([1.0, -2.0, 0.5, 1.0])
    assert resampling_weights(scores).tolist() == pytest.approx([1, 4, 0.25, 1], abs=1e-6)
    assert resampling_weights(scores, weight_pow=3.0).tolist() == pytest.approx([1, 8, 0.125, 1], abs=1e-6)
    assert resampling_weights(scores, method="max_min").tolist() == pytest.approx([1, 1, 0, 1], abs=1e-6)
    assert resampling_weights(scores, method="max_random").tolist() == pytest.approx([0.4, 0.1, 0.1, 0.4], abs=1e-6)
    assert resampling_weights(torch.zeros(1)).item() == pytest.approx(1e-8)
    assert resampling_probabilities(torch.tensor([1.0, 3.0])).tolist() == [0.25, 0.75]


def test_overlong_responses_pay_for_what_is_in_the_buffer() -> None:
    lengths = torch.tensor([5, 6, 7, 10, 12])
    found = overlong_penalty(torch.ones(5), lengths, max_len=10, buffer_len=4)
    assert found.tolist() == [1.0, 1.0, 0.75, 0.0, 0.0]
    assert overlong_penalty(torch.ones(5), lengths, max_len=10, buffer_len=4, penalty_factor=0.5).tolist()[2:] == [0.875, 0.5, 0.5]
    exact = overlong_penalty(torch.ones(1, dtype=torch.float64), torch.tensor([8]), max_len=10, buffer_len=3)
    assert exact.tolist() == [1 - 1 / 3]


def test_what_ran_out_of_tokens_earns_less() -> None:
    rewards, truncated = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([1, 0, 1])
    assert stop_properly(rewards, truncated, coef=0.5).tolist() == [0.5, -1.0, 1.0]
    assert stop_properly(rewards, truncated, coef=0.0).tolist() == [0.0, -1.0, 0.0]
    assert stop_properly(rewards, truncated, coef=-1.5).tolist() == [-1.5, -1.0, -1.5]


def test_shares_are_added_up_in_float64_and_end_at_one() -> None:
    """A third is more in float32; ten tenths are less than 1, and the last number there is must still draw the last episode."""
    thirds = resample_counts(torch.ones(3), torch.tensor([0.33333334, 0.0, 0.0], dtype=torch.float64))
    assert thirds.tolist() == [2, 1, 0]
    tenths = resample_counts(torch.ones(10), torch.full((10,), 1 - 2.0**-53, dtype=torch.float64))
    assert tenths.tolist() == [0] * 9 + [10]


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_weights_have_the_precision_of_the_scores(method: Resampling) -> None:
    assert resampling_weights(torch.ones(2, dtype=torch.float64), method=method).dtype == torch.float64
