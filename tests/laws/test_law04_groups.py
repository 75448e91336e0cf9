"""Law 4: groups are by id, for every estimator of the table that is given groups, with every choice of its parameters.

A group of one has advantage 0, constant rewards give exactly 0, a permutation of rows permutes the result, a shift of
the rewards changes nothing, and no group sees another. What is no law for an estimator stands in EXCEPT, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algos import segments
from tandem.algos.advantages import spread
from tandem.algos.columns import bound
from tandem.algos.composition import inputs_of, parameters_of, types_of
from tandem.algos.functions import ADVANTAGES, advantage_functions
from tandem.algos.returns import Credit, token_rewards
from tests.algos.batches import Layout, make_batch
from tests.laws.breaking import Breaker

AWKWARD = [0.0, 1.0, 0.1, -0.1, 1 / 3, 0.7, 1e-8, 1e6 + 0.1, -12345.678]
quickly = settings(max_examples=12, phases=[Phase.explicit, Phase.generate])
REWARDS = st.lists(st.integers(-2, 4).map(lambda k: k / 4), min_size=1, max_size=8)


OTHERS = make_batch([3] * 100, mask=[True, False, True] * 100) | {"token_counts": 1 + torch.arange(100) % 3}
OTHERS["sum_pi_squared"] = OTHERS["old_logprobs"].exp() ** 2 + 0.01
"""Columns that are not rewards, for a hundred rows."""


@dataclass(frozen=True)
class Estimator:
    """One of ADVANTAGES and one choice of parameters."""

    name: str
    params: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.params.items())])

    def __call__(self, rewards: Tensor, groups: Tensor, numbers: Tensor | None = None, *, varied: bool = False) -> Tensor:
        """[B, 2]: the advantages of each row's two tokens, which stand around a masked one.

        numbers: of the rows, by which their other columns are looked up; in order if None. varied: process
        rewards are those of OTHERS too, and else the reward on every token.
        """
        num = len(rewards)
        rows = Layout([(i, [3 * i, 3 * i + 1, 3 * i + 2]) for i in (range(num) if numbers is None else numbers.tolist())]).of(
            OTHERS
        )
        mask, lengths = rows["mask"], rows["lengths"]
        rows |= {"rewards": rewards, "groups": groups}
        rows |= {"reward_components": torch.stack([rewards, 0.5 * rewards], 1)}
        rows |= {"token_rewards": token_rewards(rewards.double(), mask, lengths)}
        varying = rows["prm_logprobs"] - rows["ref_logprobs"]
        rows |= {"process_rewards": varying if varied else spread(rewards.double(), mask, lengths)}
        (function,) = advantage_functions(self.name)
        found = function(*bound(function, rows), **self.params)
        advantages = found.advantages if isinstance(found, Credit) else spread(found, mask, lengths)
        return advantages[mask].view(num, 2)


def _choices() -> Iterator[Estimator]:
    """Defaults, and every other value of each parameter that has a few; those that contradict the rest are refused."""
    for name in ADVANTAGES:
        (function,) = advantage_functions(name)
        if "groups_B" not in inputs_of(function):
            continue
        yield Estimator(name)
        for key, kind in types_of(function).items():
            values = get_args(kind) if get_origin(kind) is Literal else (True, False) if kind is bool else ()
            for value in values:
                if value != parameters_of(function)[key].default:
                    yield Estimator(name, {key: value})


ESTIMATORS = list(_choices())
ALONE = dict.fromkeys(
    (
        f"{name} singleton=reward"
        for name in (
            *("group_baseline", "decoupled_normalization", "length_weighted_baseline", "nonzero_scaled_baseline"),
            "optimal_token_baseline",
        )
    ),
    "a group of one has its reward",
)
EXCEPT: dict[str, dict[str, str]] = {
    "one": ALONE,
    "constant": dict.fromkeys(
        ("optimal_token_baseline", "optimal_token_baseline singleton=reward"), "a small number is added to the sum of the weights"
    ),
    "shift": {
        "nonzero_scaled_baseline": "which rewards are 0 matters",
        "mean_normalized": "divides by the mean",
        **ALONE,
    },
    "sees no other": {
        "nonzero_scaled_baseline": "counts rewards of the whole batch",
        "nonzero_scaled_baseline singleton=reward": "counts rewards of the whole batch",
        "group_baseline scale=batch": "divides by the deviation of the whole batch",
    },
}
"""By law and estimator."""


def _groups(draw: st.DataObject, num: int) -> Tensor:
    """Ids in no order and with gaps; groups of one are frequent."""
    return torch.tensor(draw.draw(st.lists(st.sampled_from([-7, 3, 11, 400]), min_size=num, max_size=num)))


def check_a_group_of_one_has_advantage_zero(estimator: Estimator) -> None:
    for reward in AWKWARD:
        for varied in (False, True):
            assert not bool(estimator(torch.tensor([reward]), torch.tensor([5]), varied=varied).any())
    among_others = estimator(torch.tensor([0.3, 1.0, 0.0]), torch.tensor([5, 2, 2]))
    assert not bool(among_others[0].any())
    assert bool((among_others[1] > among_others[2]).all())


def check_constant_rewards_give_exactly_zero(estimator: Estimator) -> None:
    for reward in AWKWARD:
        for num in (2, 3, 5, 7, 8, 16, 100):
            for dtype in (torch.float32, torch.float64):
                constant = torch.full((num,), reward, dtype=dtype)
                assert not bool(estimator(constant, torch.zeros(num, dtype=torch.int64)).any()), (reward, num)


def check_a_permutation_of_rows_permutes_the_result(estimator: Estimator) -> None:
    @quickly
    @given(REWARDS, st.data())
    def law(rewards: list[float], draw: st.DataObject) -> None:
        given, groups = torch.tensor(rewards), _groups(draw, len(rewards))
        order = torch.tensor(draw.draw(st.permutations(range(len(rewards)))))
        torch.testing.assert_close(
            estimator(given[order], groups[order], order), estimator(given, groups)[order], atol=1e-6, rtol=1e-6
        )

    law()


def check_a_shift_of_the_rewards_changes_nothing(estimator: Estimator) -> None:
    @quickly
    @given(REWARDS, st.integers(-64, 64), st.data())
    def law(rewards: list[float], shift: int, draw: st.DataObject) -> None:
        given, groups = torch.tensor(rewards), _groups(draw, len(rewards))
        torch.testing.assert_close(estimator(given + shift, groups), estimator(given, groups), atol=1e-5, rtol=1e-6)

    law()


def check_no_group_sees_another(estimator: Estimator) -> None:
    @quickly
    @given(REWARDS, st.data())
    def law(rewards: list[float], draw: st.DataObject) -> None:
        given, groups = torch.tensor(rewards), _groups(draw, len(rewards))
        together = estimator(given, groups)
        for group in groups.unique():
            (mine,) = torch.nonzero(groups == group, as_tuple=True)
            torch.testing.assert_close(estimator(given[mine], groups[mine], mine), together[mine], atol=1e-6, rtol=1e-6)

    law()


LAWS: dict[str, Callable[[Estimator], None]] = {
    "one": check_a_group_of_one_has_advantage_zero,
    "constant": check_constant_rewards_give_exactly_zero,
    "permutation": check_a_permutation_of_rows_permutes_the_result,
    "shift": check_a_shift_of_the_rewards_changes_nothing,
    "sees no other": check_no_group_sees_another,
}


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("law", LAWS)
def test_the_law_holds_and_its_exceptions_are_ones(law: str, estimator: Estimator) -> None:
    if str(estimator) in EXCEPT.get(law, {}):
        with pytest.raises(AssertionError):
            LAWS[law](estimator)
    else:
        LAWS[law](estimator)


def _wrong(rewards: Tensor, groups: Tensor, *, singleton_is_raw: bool = False) -> Tensor:
    """The textbook line in float32, with the faults that it invites."""
    out = torch.zeros(len(rewards))
    for group in groups.unique():
        mine = groups == group
        of_group = rewards[mine].float()
        if len(of_group) == 1:
            out[mine] = of_group if singleton_is_raw else 0.0
        else:
            out[mine] = (of_group - of_group.mean()) / (of_group.std() + 1e-6)
    return out


_GROUPS = segments.Groups.__init__


def _by_position(self: segments.Groups, groups: Tensor) -> None:
    """The first half is a group, the second half another one."""
    _GROUPS(self, torch.arange(len(groups)) // max(len(groups) // 2, 1))


BY_NAME = {str(estimator): estimator for estimator in ESTIMATORS if not estimator.params}
BREAKERS = [
    *(
        Breaker(
            4,
            f"{name}: groups by position",
            "tandem.algos.segments:Groups.__init__",
            _by_position,
            partial(check_a_permutation_of_rows_permutes_the_result, estimator),
        )
        for name, estimator in BY_NAME.items()
    ),
    Breaker(
        4,
        "groups by position, seen from one group",
        "tandem.algos.segments:Groups.__init__",
        _by_position,
        partial(check_no_group_sees_another, BY_NAME["group_baseline"]),
    ),
    Breaker(
        4,
        "a group of one keeps its raw reward",
        "tandem.algos.advantages:group_baseline",
        partial(_wrong, singleton_is_raw=True),
        partial(check_a_group_of_one_has_advantage_zero, BY_NAME["group_baseline"]),
    ),
    *(
        Breaker(
            4,
            f"{name}: rounding survives in constant rewards",
            f"tandem.algos.segments:Groups.{shift}",
            lambda self, values: np.zeros_like(values),
            partial(check_constant_rewards_give_exactly_zero, BY_NAME[name]),
        )
        for name, shift in (
            ("group_baseline", "anchor"),
            ("length_weighted_baseline", "anchor"),
            ("nonzero_scaled_baseline", "anchor"),
            ("process_and_outcome", "lowest"),
        )
    ),
    Breaker(
        4,
        "rewards are not centred before they are squared",
        "tandem.algos.advantages:group_baseline",
        lambda rewards, groups: _wrong(1 + rewards.abs(), groups),
        partial(check_a_shift_of_the_rewards_changes_nothing, BY_NAME["group_baseline"]),
    ),
]
