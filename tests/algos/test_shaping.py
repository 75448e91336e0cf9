"""Which episodes are drawn anew: the draws by hand, and their shares."""

from __future__ import annotations

import pytest
import torch

from tandem.algos.shaping import Resampling, resample_counts, resampling_probabilities, resampling_weights


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
