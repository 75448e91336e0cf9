from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.algos.advantages import (
    batch_baseline,
    best_of_group,
    decoupled_normalization,
    group_baseline,
    length_weighted_baseline,
    mean_normalized,
    no_baseline,
    nonzero_scaled_baseline,
    soft_mean_centred,
    spread,
)
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
        with pytest.raises(NonFiniteError, match=f"column 'rewards' is {bad} at row 1"):
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
    assert spread(torch.tensor([2.0, 7.0, -1.0]), mask, torch.tensor([3, 0, 2])).tolist() == [0, 2, 2, -1, 0]


GROUP = torch.tensor([4, 4, 4, 9])  # three companions and one alone


def test_baselines_of_the_batch() -> None:
    assert batch_baseline(torch.tensor([1.0, 0.0, 0.5])).tolist() == [0.5, -0.5, 0.0]
    assert batch_baseline(torch.zeros(0)).tolist() == []
    assert no_baseline(torch.tensor([1.0, -2.0], dtype=torch.float64)).tolist() == [1.0, -2.0]
    assert no_baseline(torch.ones(1, dtype=torch.float64)).dtype == torch.float32


def test_a_baseline_weighted_by_length() -> None:
    """(1 * 1 + 3 * 0 + 4 * 0.5) / 8 = 0.375."""
    rewards, counts = torch.tensor([1.0, 0.0, 0.5, 7.0]), torch.tensor([1, 3, 4, 5])
    assert length_weighted_baseline(rewards, GROUP, counts).tolist() == [0.625, -0.375, 0.125, 0.0]
    assert length_weighted_baseline(rewards + 2, GROUP, counts).tolist() == [0.625, -0.375, 0.125, 0.0]
    assert length_weighted_baseline(rewards, GROUP, counts, singleton="reward")[3] == 7
    nothing = length_weighted_baseline(torch.tensor([1.0, 1.0]), torch.tensor([1, 1]), torch.zeros(2))
    assert nothing.tolist() == [0.0, 0.0]


def test_a_scale_by_how_many_rewards_are_not_zero() -> None:
    """Four episodes, three of them with a reward; the group's mean is 0.5."""
    found = nonzero_scaled_baseline(torch.tensor([1.0, 0.0, 0.5, 7.0]), GROUP)
    torch.testing.assert_close(found, 4 / 3 * torch.tensor([0.5, -0.5, 0.0, 0.0]))
    alone = nonzero_scaled_baseline(torch.tensor([1.0, 0.0, 0.5, 7.0]), GROUP, singleton="reward")[3]
    assert alone.item() == pytest.approx(28 / 3)
    assert nonzero_scaled_baseline(torch.zeros(4), GROUP).tolist() == [0.0] * 4


def test_rewards_over_the_mean_of_their_group() -> None:
    found = mean_normalized(torch.tensor([1.0, 0.0, 0.5, 7.0]), GROUP, mean_eps=0.5)
    assert found.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert mean_normalized(torch.tensor([-1.0, 0.0, 1.0, 7.0]), GROUP).tolist() == [0.0] * 4  # a mean of 0 has never succeeded
    assert mean_normalized(torch.zeros(2), torch.zeros(2).long(), mean_eps=0.0).tolist() == [0.0, 0.0]


def test_the_best_of_a_group_learns_by_its_lead() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 7.0])  # deviation 0.5
    assert best_of_group(rewards, GROUP, scale="none").tolist() == [0.5, 0.0, 0.0, 0.0]
    assert best_of_group(rewards, GROUP, std_eps=0.5).tolist() == [0.5, 0.0, 0.0, 0.0]
    assert best_of_group(rewards, GROUP, std_eps=0.0).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert best_of_group(rewards - 5, GROUP, scale="none").tolist() == [0.5, 0.0, 0.0, 0.0]
    assert best_of_group(torch.tensor([1.0, 1.0, 0.0, 7.0]), GROUP).tolist() == [0.0] * 4
    assert best_of_group(torch.ones(4), GROUP, std_eps=0.0).tolist() == [0.0] * 4


def test_each_reward_is_normalised_by_itself() -> None:
    components = torch.tensor([[1.0, 10.0], [0.0, 30.0], [0.5, 20.0], [7.0, 7.0]])
    first, second = torch.tensor([1.0, -1.0, 0.0, 0.0]), torch.tensor([-1.0, 1.0, 0.0, 0.0])
    exact = {"std_eps": 0.0}
    torch.testing.assert_close(decoupled_normalization(components, GROUP, **exact), first + second)  # type: ignore[arg-type]
    weighted = decoupled_normalization(components, GROUP, reward_weights=[1.0, 0.25], std_eps=0.0)
    torch.testing.assert_close(weighted, first + 0.25 * second)
    biased = decoupled_normalization(components, GROUP, reward_weights=[1.0, 0.25], std_eps=0.0, ddof=0)
    torch.testing.assert_close(biased, weighted * 1.5**0.5)
    alone = decoupled_normalization(components, GROUP, reward_weights=[1.0, 0.25], singleton="reward")
    assert alone[3].item() == 7.0 * 1.25
    for wrong in ([1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(ValueError, match="2 reward components"):
            decoupled_normalization(components, GROUP, reward_weights=wrong)


def test_the_soft_mean() -> None:
    rewards = torch.tensor([1.0, 0.0])
    soft = math.log((math.exp(2.0) + 1) / 2) / 2
    assert soft_mean_centred(rewards, soft_mean_beta=2.0).tolist() == pytest.approx([1 - soft, -soft])


def test_every_estimator_refuses_a_reward_that_is_not_finite() -> None:
    bad, groups = torch.tensor([0.0, math.nan]), torch.zeros(2, dtype=torch.int64)
    for call in (
        lambda: batch_baseline(bad),
        lambda: no_baseline(bad),
        lambda: length_weighted_baseline(bad, groups, torch.ones(2)),
        lambda: nonzero_scaled_baseline(bad, groups),
        lambda: mean_normalized(bad, groups),
        lambda: best_of_group(bad, groups),
        lambda: soft_mean_centred(bad),
    ):
        with pytest.raises(NonFiniteError):
            call()


def test_the_deviation_of_the_others_is_small_but_real() -> None:
    """Others of 0 and 1e-5 have a deviation; what rounding leaves of equal ones is 1e-12 of the squares and has none."""
    rewards = torch.tensor([0.0, 1e-5, 1.0], dtype=torch.float64)
    found = group_baseline(rewards, torch.zeros(3, dtype=torch.int64), leave_one_out=True, std_eps=0.0)
    assert found[2].item() == pytest.approx((1 - 5e-6) / (1e-5 / 2**0.5), rel=1e-4)


def test_ddof_with_two_members() -> None:
    """Two rewards 1 apart: a deviation of 0.5 with ddof 0 and of 0.7071 with 1; of one other there is none."""
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([1, 1])
    assert group_baseline(rewards, groups, ddof=0, std_eps=0.0).tolist() == [1.0, -1.0]
    assert group_baseline(rewards, groups, ddof=1, std_eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert group_baseline(rewards, groups, leave_one_out=True).tolist() == [1.0, -1.0]
    assert group_baseline(rewards, groups, scale="batch", std_eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert group_baseline(torch.tensor([3.0]), torch.tensor([1]), scale="batch", std_eps=0.0).tolist() == [0.0]


# --------------------------------------------------------------------------------------------- for every estimator

GROUPED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_baseline": group_baseline,
    "leave one out": lambda rewards, groups: group_baseline(rewards, groups, leave_one_out=True),
    "of the batch": lambda rewards, groups: group_baseline(rewards, groups, scale="batch"),
    "batch_baseline": lambda rewards, groups: batch_baseline(rewards),
    "length_weighted": lambda rewards, groups: length_weighted_baseline(rewards, groups, torch.arange(1, len(rewards) + 1)),
    "nonzero_scaled": nonzero_scaled_baseline,
    "mean_normalized": mean_normalized,
    "best_of_group": best_of_group,
    "decoupled": lambda rewards, groups: decoupled_normalization(torch.stack([rewards, rewards], 1), groups),
}


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_give_exactly_zero_and_a_result_is_float32(name: str) -> None:
    for num in (3, 5, 7):
        for reward in (0.1, 0.7, 1e6 + 0.1):
            for dtype in (torch.float32, torch.float64):
                found = GROUPED[name](torch.full((num,), reward, dtype=dtype), torch.zeros(num, dtype=torch.int64))
                assert found.tolist() == [0.0] * num
                assert found.dtype == torch.float32
    assert soft_mean_centred(torch.ones(2, dtype=torch.float64)).dtype == torch.float32
    assert soft_mean_centred(torch.tensor([0.3])).tolist() == [0.0]


def rounded_once(found: Tensor, want: Tensor) -> None:
    """`found` is `want`, computed in float64, to half of the last place of float32."""
    assert bool(((found.double() - want).abs() <= 6e-8 * want.abs() + 1e-30).all())


def test_arithmetic_is_in_float64() -> None:
    """Groups of 50; the best of a group, and the largest of all, are well apart."""
    rewards = torch.rand(200, generator=torch.Generator().manual_seed(0)) + 1000
    groups, r = torch.arange(200) % 4, rewards.double()
    counts = torch.arange(200) % 7 + 1
    mean, std = (torch.stack([f(r[groups == g]) for g in range(4)])[groups] for f in (torch.mean, torch.std))
    weighted = torch.stack([(r * counts)[groups == g].sum() / counts[groups == g].sum() for g in range(4)])[groups]
    rounded_once(group_baseline(rewards, groups, std_eps=0.0), (r - mean) / std)
    rounded_once(batch_baseline(rewards), r - r.mean())
    rounded_once(length_weighted_baseline(rewards, groups, counts), r - weighted)
    rounded_once(nonzero_scaled_baseline(rewards, groups), r - mean)
    rounded_once(mean_normalized(rewards, groups, mean_eps=0.0), (r - mean) / mean)
    rounded_once(soft_mean_centred(rewards), r - torch.logsumexp(r, 0) + math.log(200))
    wide, one = torch.tensor([1e-3, 3e3, 1500.05]), torch.zeros(3, dtype=torch.int64)  # the last is near the mean of all
    rounded_once(length_weighted_baseline(wide, one, torch.ones(3)), wide.double() - wide.double().mean())
    best = best_of_group(rewards, groups, std_eps=0.0)
    for group in range(4):
        (first, second), mine = r[groups == group].topk(2).values, groups == group
        rounded_once(best[mine].max(), (first - second) / std[mine][0])
    components = torch.stack([rewards, rewards.flip(0)], 1)
    flipped = torch.arange(199, -1, -1)
    of_flipped = (r[flipped] - mean[flipped]) / std[flipped]  # whose groups are those of `groups`, in another order
    found = decoupled_normalization(components, groups, reward_weights=[0.3, 0.1], std_eps=0.0)
    rounded_once(found, 0.3 * (r - mean) / std + 0.1 * of_flipped)


def test_components_that_nearly_cancel_are_rounded_after_they_are_summed() -> None:
    """Of a pair, both normalised components are half the root of 2, but for what std_eps takes away."""
    found = decoupled_normalization(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([3, 3]))
    gap = 0.5 / (0.5**0.5 + 1e-6) - 1 / (2**0.5 + 1e-6)
    assert found.tolist() == pytest.approx([gap, -gap], rel=1e-6, abs=0)


def test_pairs_learn() -> None:
    rewards, pair = torch.tensor([1.0, 0.0]), torch.tensor([3, 3])
    assert length_weighted_baseline(rewards, pair, torch.tensor([1, 1])).tolist() == [0.5, -0.5]
    assert length_weighted_baseline(rewards, pair, torch.tensor([1, 0])).tolist() == [0.0, -1.0]
    assert nonzero_scaled_baseline(rewards, pair).tolist() == [1.0, -1.0]  # one of two has a reward
    assert nonzero_scaled_baseline(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([3, 3, 3])).tolist() == pytest.approx(
        [0.5, 0.5, -1.0]
    )
    assert mean_normalized(rewards, pair, mean_eps=0.25).tolist() == pytest.approx([2 / 3, -2 / 3])
    assert best_of_group(rewards, pair, std_eps=0.25).tolist() == pytest.approx([1 / (0.5**0.5 + 0.25), 0.0])
    components = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    assert decoupled_normalization(components, pair, std_eps=1.0).tolist() == pytest.approx(
        [0.5 / (1 + 0.5**0.5) + 1.5 / (1 + 3 * 0.5**0.5), -0.5 / (1 + 0.5**0.5) - 1.5 / (1 + 3 * 0.5**0.5)]
    )


def test_what_rounding_leaves_of_equal_others_is_a_share_of_all_squares() -> None:
    """A deviation counts if its square is more than 1e-12 of that of the whole group: from about 1.2e-6 of the range."""

    def last(others: float, scale: float = 1.0) -> float:
        rewards = scale * torch.tensor([0.0, others, 1.0], dtype=torch.float64)
        return group_baseline(rewards, torch.zeros(3, dtype=torch.int64), leave_one_out=True, std_eps=0.0)[2].item()

    assert last(1.41e-6) == pytest.approx(2**0.5 / 1.41e-6, rel=1e-4)
    assert last(1.0e-6) == pytest.approx(1.0, rel=1e-4)
    assert last(1e-2, scale=1e-6) == pytest.approx((1 - 5e-3) * 2**0.5 / 1e-2, rel=1e-4)
