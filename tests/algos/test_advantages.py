from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.algos.advantages import best_of_group, group_baseline, spread
from tandem.errors import NonFiniteError

REWARDS = torch.tensor([1.0, 0.0, 0.25, 3.0, 1.0, 2.0])
GROUPS = torch.tensor([8, 8, 3, 3, 8, 3])


def of_group(group: int) -> tuple[Tensor, Tensor]:
    mine = group == GROUPS
    return mine, REWARDS[mine].double()


@pytest.mark.parametrize("ddof", [0, 1])
def test_mean_and_deviation_of_the_group(ddof: int) -> None:
    got = group_baseline(REWARDS, GROUPS, ddof=ddof, std_eps=0.5)  # type: ignore[arg-type]
    assert got.dtype == torch.float32
    for group in (3, 8):
        mine, rewards = of_group(group)
        want = (rewards - rewards.mean()) / (rewards.std(correction=ddof) + 0.5)
        torch.testing.assert_close(got[mine].double(), want, atol=1e-6, rtol=0)


def test_no_deviation_and_that_of_the_batch() -> None:
    plain, batch = group_baseline(REWARDS, GROUPS, scale="none"), group_baseline(REWARDS, GROUPS, scale="batch", std_eps=0)
    for group in (3, 8):
        mine, rewards = of_group(group)
        torch.testing.assert_close(plain[mine].double(), rewards - rewards.mean(), atol=1e-6, rtol=0)
    torch.testing.assert_close(batch, plain / REWARDS.std(), atol=1e-6, rtol=0)


def test_leave_one_out_looks_at_the_others() -> None:
    got = group_baseline(REWARDS, GROUPS, leave_one_out=True)
    for i, (reward, group) in enumerate(zip(REWARDS.tolist(), GROUPS.tolist(), strict=True)):
        others = torch.cat([REWARDS[:i], REWARDS[i + 1 :]])[torch.cat([GROUPS[:i], GROUPS[i + 1 :]]) == group].double()
        deviation = others.std()
        want = (reward - others.mean()) / (deviation + 1e-6 if deviation > 0 else 1)
        torch.testing.assert_close(got[i].double(), want, atol=1e-6, rtol=1e-6)


def test_leave_one_out_does_not_divide_by_what_rounding_leaves() -> None:
    got = group_baseline(
        torch.tensor([0.1, 0.1, 0.1, 0.7], dtype=torch.float64), torch.zeros(4, dtype=torch.int64), leave_one_out=True
    )
    assert got[3].item() == pytest.approx(0.6)


def test_a_large_offset_costs_no_precision() -> None:
    """E[x^2] - E[x]^2 would leave nothing of a deviation of 1e-3 on top of 1e6."""
    rewards = torch.tensor([1e6, 1e6 + 1e-3, 1e6 + 2e-3], dtype=torch.float64)
    torch.testing.assert_close(
        group_baseline(rewards, torch.zeros(3, dtype=torch.int64), std_eps=0), torch.tensor([-1.0, 0.0, 1.0]), atol=1e-5, rtol=0
    )


def test_a_group_of_one() -> None:
    rewards, groups = torch.tensor([0.5, 1.0, 0.0]), torch.tensor([1, 2, 2])
    assert group_baseline(rewards, groups)[0] == 0
    assert group_baseline(rewards, groups, singleton="reward")[0] == 0.5
    assert group_baseline(rewards, groups, leave_one_out=True)[0] == 0


def test_wrong_input() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteError, match=f"reward {bad} of episode 1"):
            group_baseline(torch.tensor([0.0, bad]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="choose one"):
        group_baseline(REWARDS, GROUPS, scale="batch", leave_one_out=True)
    with pytest.raises(ValueError, match="std_eps"):
        group_baseline(REWARDS, GROUPS, std_eps=-1)
    assert group_baseline(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_of_equal_bests_none_learns() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 2.0, 1.0]), torch.tensor([1, 1, 1, 2, 2])
    assert best_of_group(rewards, groups, scale="none").tolist() == [0, 0, 0, 1, 0]


def test_spread_gives_each_counted_token_its_rows_value() -> None:
    mask = torch.tensor([False, True, True, True, False])
    assert spread(torch.tensor([2.0, torch.nan, -1.0]), mask, torch.tensor([3, 0, 2])).tolist() == [0, 2, 2, -1, 0]
