from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tandem.algos.segments import (
    CountedTokens,
    Groups,
    on_tokens,
    row_counts,
    row_max,
    row_mean,
    row_of_token,
    row_sum,
    to_array,
)

#   rows of 4, 0, 2 and 1 tokens; the last has none that counts
LENGTHS = torch.tensor([4, 0, 2, 1])
MASK = torch.tensor([True, False, True, True, False, True, False])
VALUES = torch.tensor([1.0, 9.0, -2.0, 4.0, 9.0, -3.0, 9.0])


def test_rows() -> None:
    assert row_of_token(LENGTHS).tolist() == [0, 0, 0, 0, 2, 2, 3]
    assert on_tokens(torch.tensor([5, 6, 7, 8]), LENGTHS).tolist() == [5, 5, 5, 5, 7, 7, 8]
    assert row_counts(MASK, LENGTHS).tolist() == [3, 0, 1, 0]
    assert row_sum(VALUES, MASK, LENGTHS).tolist() == [3.0, 0.0, -3.0, 0.0]
    assert row_mean(VALUES, MASK, LENGTHS).tolist() == [1.0, 0.0, -3.0, 0.0]
    assert row_max(VALUES, MASK, LENGTHS).tolist() == [4.0, 0.0, -3.0, 0.0]


def test_counted_tokens_stand_without_the_masked_ones_between_them() -> None:
    counted = CountedTokens(MASK, LENGTHS)
    assert counted.counts.tolist() == [3, 0, 1, 0]
    assert counted.of(VALUES).tolist() == [1.0, -2.0, 4.0, -3.0]
    assert counted.back(counted.of(VALUES)).tolist() == [1.0, 0.0, -2.0, 4.0, 0.0, -3.0, 0.0]
    assert counted.last().long().tolist() == [0, 0, 0, 1, 0, 1, 0]
    assert counted.next(counted.of(VALUES)).tolist() == [-2.0, 4.0, 0.0, 0.0]


def test_where_every_token_counts_nothing_is_moved() -> None:
    counted = CountedTokens(torch.ones(7, dtype=torch.bool), LENGTHS)
    assert counted.of(VALUES) is VALUES
    assert counted.back(VALUES) is VALUES
    assert counted.last().long().tolist() == [0, 0, 0, 1, 0, 1, 1]
    assert counted.next(VALUES).tolist() == [9.0, -2.0, 4.0, 0.0, -3.0, 0.0, 0.0]


def test_gradients_reach_counted_tokens_only() -> None:
    for reduce, want in ((row_sum, [1, 0, 1, 1, 0, 1, 0]), (row_mean, [1 / 3, 0, 1 / 3, 1 / 3, 0, 1, 0])):
        values = torch.where(MASK, VALUES, torch.nan).requires_grad_()
        (found,) = torch.autograd.grad(reduce(values, MASK, LENGTHS).sum(), values)
        torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float32))


def discounted_sums(values: Tensor, mask: Tensor, lengths: Tensor, discount: float | Tensor) -> Tensor:
    counted = CountedTokens(mask, lengths)
    return counted.back(counted.discounted_sums(counted.of(values), discount))


def test_discounted_sums_step_over_what_is_masked() -> None:
    assert discounted_sums(VALUES, MASK, LENGTHS, 1.0).tolist() == [3.0, 0.0, 2.0, 4.0, 0.0, -3.0, 0.0]
    assert discounted_sums(VALUES, MASK, LENGTHS, 0.5).tolist() == [1.0, 0.0, 0.0, 4.0, 0.0, -3.0, 0.0]
    assert discounted_sums(VALUES, MASK, LENGTHS, 0.0).tolist() == [1.0, 0.0, -2.0, 4.0, 0.0, -3.0, 0.0]
    by_row = discounted_sums(torch.ones(7), torch.ones(7, dtype=torch.bool), LENGTHS, torch.tensor([0.5, 9.0, 0.0, 9.0]))
    assert by_row.tolist() == [1.875, 1.75, 1.5, 1.0, 1.0, 1.0, 1.0]
    long = discounted_sums(torch.ones(11), torch.ones(11, dtype=torch.bool), torch.tensor([9, 2]), 0.5)
    assert long.tolist() == [2 - 2.0**-left for left in range(8, -1, -1)] + [1.5, 1.0]
    assert discounted_sums(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), 0.5).tolist() == []
    assert not discounted_sums(VALUES.clone().requires_grad_(), MASK, LENGTHS, 0.5).requires_grad


def test_rows_without_a_counted_token_end_nowhere() -> None:
    none = CountedTokens(torch.tensor([False, False]), torch.tensor([1, 1]))
    assert none.last().tolist() == [False, False]
    assert discounted_sums(torch.ones(2), torch.tensor([False, False]), torch.tensor([1, 1]), 0.5).tolist() == [0.0, 0.0]


def test_precision() -> None:
    half = on_tokens(torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.tensor([2, 1]))
    assert (half.tolist(), half.dtype) == ([1.5, 1.5, -2.0], torch.bfloat16)
    assert row_max(torch.ones(1, dtype=torch.bfloat16), torch.tensor([True]), torch.tensor([1])).dtype == torch.float32
    every, one_row = torch.ones(9, dtype=torch.bool), torch.tensor([9])
    values, discount = torch.ones(9, dtype=torch.float64), torch.tensor([0.1])
    want = discounted_sums(values, every, one_row, discount.double())
    assert torch.equal(discounted_sums(values, every, one_row, discount), want)


def test_a_column_of_rows_as_an_array() -> None:
    rewards = torch.tensor([1.5, -2.0])
    for column in (rewards, rewards.bfloat16(), rewards.double(), rewards.clone().requires_grad_(), torch.tensor([True, False])):
        found = to_array(column)
        assert found.dtype == np.float64
        assert found.tolist() == column.tolist()


def test_groups_of_nothing() -> None:
    none = Groups(torch.zeros(0, dtype=torch.int64))
    assert (none.sizes.tolist(), none.mean(np.zeros(0)).tolist(), none.lowest(np.zeros(0)).tolist()) == ([], [], [])


def test_groups_by_id() -> None:
    groups = Groups(torch.tensor([7, -1, 7, 40]))
    values = np.array([1.0, 5.0, -3.0, -2.0])
    assert groups.sizes.tolist() == [1, 2, 1]
    assert groups.size.tolist() == [2, 1, 2, 1]
    assert groups.sum(values).tolist() == [-2.0, 5.0, -2.0, -2.0]
    assert groups.mean(values).tolist() == [-1.0, 5.0, -1.0, -2.0]
    assert groups.lowest(values).tolist() == [-3.0, 5.0, -3.0, -2.0]
    assert groups.highest(values).tolist() == [1.0, 5.0, 1.0, -2.0]
    anchor = groups.anchor(values)
    assert anchor[0] == anchor[2]
    assert anchor[0] in values[[0, 2]]
    assert anchor[[1, 3]].tolist() == [5.0, -2.0]
