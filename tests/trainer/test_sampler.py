from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tandem.errors import DataError
from tandem.trainer.sampler import TaskOrder, seed_of


@given(size=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), ordinals=st.lists(st.integers(0, 200), max_size=30))
def test_each_epoch_is_a_permutation_by_seed_and_ordinal_alone(size: int, seed: int, ordinals: list[int]) -> None:
    order = TaskOrder(size, seed)
    straight = [order.position(ordinal) for ordinal in range(size * 6)]
    for epoch in range(6):
        assert sorted(straight[epoch * size : (epoch + 1) * size]) == list(range(size))
    jumping = TaskOrder(size, seed)
    assert [jumping.position(o) for o in ordinals] == [TaskOrder(size, seed).position(o) for o in ordinals]


def test_what_is_not_shuffled_goes_from_the_first_to_the_last() -> None:
    assert [TaskOrder(3, 7, shuffled=False).position(ordinal) for ordinal in (0, 1, 2, 3, 7)] == [0, 1, 2, 0, 1]


def test_epochs_and_seeds_differ() -> None:
    orders = [[TaskOrder(50, seed).position(50 * epoch + i) for i in range(50)] for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_parts_of_a_run_have_seeds_of_their_own() -> None:
    seeds = {seed_of(seed, part) for seed in range(50) for part in ("train", "eval", "demonstrations")}
    assert len(seeds) == 150
    assert seed_of(7, "eval") == seed_of(7, "eval")


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="'sorting' has no tasks"):
        TaskOrder(0, 0, "dataset 'sorting'")
