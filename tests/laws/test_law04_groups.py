"""Law 4: groups are by id.

A group of one has advantage 0, constant rewards give exactly 0, a permutation of rows permutes the result, a shift of
the rewards changes nothing, and no group sees another.
"""

from __future__ import annotations

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algos.columns import advantages
from tandem.algos.table import configure
from tests.laws.breaking import Breaker

ALGORITHMS = [
    configure("grpo"),
    configure("grpo", {"ddof": 0}),
    configure("grpo", {"leave_one_out": True}),
    configure("grpo", {"scale": "batch"}),
    configure("dr_grpo", {"length_constant": 10}),
]
WITHIN_GROUPS = [algorithm for algorithm in ALGORITHMS if algorithm.params["scale"] != "batch"]
AWKWARD = [0.0, 1.0, 0.1, -0.1, 1 / 3, 0.7, 1e-8, 1e6 + 0.1, -12345.678]
quickly = settings(max_examples=60, phases=[Phase.explicit, Phase.generate])

REWARDS = st.lists(st.integers(-8, 8).map(lambda k: k / 8), min_size=1, max_size=12)


def _groups(draw: st.DataObject, num: int) -> Tensor:
    """Ids in no order and with gaps; groups of one are frequent."""
    return torch.tensor(draw.draw(st.lists(st.sampled_from([-7, 3, 11, 400]), min_size=num, max_size=num)))


def check_a_group_of_one_has_advantage_zero() -> None:
    for algorithm in ALGORITHMS:
        for reward in AWKWARD:
            assert advantages(algorithm, torch.tensor([reward]), torch.tensor([5])).tolist() == [0.0]
        among_others = advantages(algorithm, torch.tensor([0.3, 1.0, 0.0]), torch.tensor([5, 2, 2]))
        assert among_others[0] == 0
        assert among_others[1] > 0 > among_others[2]


def check_constant_rewards_give_exactly_zero() -> None:
    for algorithm in ALGORITHMS:
        for reward in AWKWARD:
            for num in (2, 3, 4, 5, 6, 7, 8, 9, 16, 100):
                for dtype in (torch.float32, torch.float64):
                    constant = torch.full((num,), reward, dtype=dtype)
                    assert not bool(advantages(algorithm, constant, torch.zeros(num, dtype=torch.int64)).any()), (reward, num)


@quickly
@given(REWARDS, st.data())
def check_a_permutation_of_rows_permutes_the_result(rewards: list[float], draw: st.DataObject) -> None:
    given, groups = torch.tensor(rewards), _groups(draw, len(rewards))
    order = torch.tensor(draw.draw(st.permutations(range(len(rewards)))))
    for algorithm in ALGORITHMS:
        straight, permuted = advantages(algorithm, given, groups), advantages(algorithm, given[order], groups[order])
        torch.testing.assert_close(permuted, straight[order], atol=1e-6, rtol=1e-6)


@quickly
@given(REWARDS, st.integers(-64, 64), st.data())
def check_a_shift_of_the_rewards_changes_nothing(rewards: list[float], shift: int, draw: st.DataObject) -> None:
    given, groups = torch.tensor(rewards), _groups(draw, len(rewards))
    for algorithm in ALGORITHMS:
        torch.testing.assert_close(
            advantages(algorithm, given + shift, groups), advantages(algorithm, given, groups), atol=1e-6, rtol=1e-6
        )


@quickly
@given(REWARDS, st.data())
def check_no_group_sees_another(rewards: list[float], draw: st.DataObject) -> None:
    given, groups = torch.tensor(rewards), _groups(draw, len(rewards))
    for algorithm in WITHIN_GROUPS:
        together = advantages(algorithm, given, groups)
        for group in groups.unique():
            mine = groups == group
            torch.testing.assert_close(advantages(algorithm, given[mine], groups[mine]), together[mine], atol=1e-6, rtol=1e-6)


test_a_group_of_one = check_a_group_of_one_has_advantage_zero
test_constant_rewards = check_constant_rewards_give_exactly_zero
test_permutation = check_a_permutation_of_rows_permutes_the_result
test_shift = check_a_shift_of_the_rewards_changes_nothing
test_no_group_sees_another = check_no_group_sees_another


def _wrong(rewards: Tensor, groups: Tensor, *, singleton_is_raw: bool = False, by_position: bool = False) -> Tensor:
    """The textbook line in float32, with the faults that it invites."""
    if by_position:
        size = next(n for n in range(min(2, len(rewards)), len(rewards) + 1) if len(rewards) % n == 0)
        groups = torch.arange(len(rewards)) // size
    out = torch.zeros(len(rewards))
    for group in groups.unique():
        mine = groups == group
        of_group = rewards[mine].float()
        if len(of_group) == 1:
            out[mine] = of_group if singleton_is_raw else 0.0
        else:
            out[mine] = (of_group - of_group.mean()) / (of_group.std() + 1e-6)
    return out


def _naive(rewards: Tensor, groups: Tensor) -> Tensor:
    return _wrong(rewards, groups)


def _by_position(rewards: Tensor, groups: Tensor) -> Tensor:
    return _wrong(rewards, groups, by_position=True)


def _raw_singleton(rewards: Tensor, groups: Tensor) -> Tensor:
    return _wrong(rewards, groups, singleton_is_raw=True)


TARGET = "tandem.algos.advantages:group_baseline"
BREAKERS = [
    Breaker(4, "groups by position", TARGET, _by_position, check_a_permutation_of_rows_permutes_the_result),
    Breaker(4, "groups by position, seen from one group", TARGET, _by_position, check_no_group_sees_another),
    Breaker(4, "a group of one keeps its raw reward", TARGET, _raw_singleton, check_a_group_of_one_has_advantage_zero),
    Breaker(4, "rounding survives in constant rewards", TARGET, _naive, check_constant_rewards_give_exactly_zero),
]
