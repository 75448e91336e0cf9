"""Turns as actions: against a recursion that walks each row's turns backwards, one at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.algos.returns import gae, turn_gae
from tests.algos.batches import batches, modestly
from tests.algos.pipeline import Rows


def by_hand(rewards: Tensor, rows: Rows, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of all tokens."""
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    start = 0
    for length in rows["lengths"].tolist():
        counted = [t for t in range(start, start + length) if rows["mask"][t]]
        turns = [list(turn) for _, turn in itertools.groupby(counted, lambda t: int(rows["turns"][t]))]
        value_next = advantage = 0.0
        for turn in reversed(turns):
            value = float(rows["values"][turn[0]])
            advantage = sum(float(rewards[t]) for t in turn) + gamma * value_next - value + gamma * lam * advantage
            value_next = value
            for t in turn:
                advantages[t], returns[t] = advantage, advantage + value
        start += length
    return advantages, returns


@modestly
@given(rows=batches(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.5, 0.0]))
def test_each_turn_is_one_step_of_the_recursion(rows: Rows, gamma: float, lam: float) -> None:
    rewards = torch.where(rows["mask"], rows["prm_logprobs"], torch.nan)
    values, turns = torch.where(rows["mask"], rows["values"], torch.nan), torch.where(rows["mask"], rows["turns"], -3)
    found = turn_gae(rewards, values, turns, rows["mask"], rows["lengths"], gamma=gamma, lam=lam)
    advantages, returns = by_hand(rewards, rows, gamma, lam)
    torch.testing.assert_close(found.advantages, torch.tensor(advantages, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.returns, torch.tensor(returns, dtype=torch.float64), rtol=0, atol=1e-12)


def test_two_turns_by_numbers() -> None:
    """Prompt, a turn of two tokens worth 1, an observation, a turn of one token worth 2: values 0.5 and 0.25 before them."""
    mask = torch.tensor([False, True, True, False, True])
    values = torch.tensor([9.0, 0.5, 7.0, 9.0, 0.25])
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0])
    found = turn_gae(rewards, values, torch.tensor([0, 0, 0, 1, 1]), mask, torch.tensor([5]), gamma=0.5, lam=0.5)
    last = 2 - 0.25
    first = 1 + 0.5 * 0.25 - 0.5 + 0.25 * last
    assert found.advantages.tolist() == pytest.approx([0, first, first, 0, last])
    assert found.returns.tolist() == pytest.approx([0, first + 0.5, first + 0.5, 0, 2])


def test_turns_of_one_token_are_tokens() -> None:
    """The first turn of a row is not the last one of the row before it, whatever their numbers."""
    mask, turns = torch.tensor([False, True, False, True, True]), torch.tensor([0, 0, 1, 1, 1])
    lengths, rewards, values = torch.tensor([4, 1]), torch.tensor([0.0, 1, 0, 2, 3]), torch.tensor([0.0, 0.5, 0, 0.25, 1])
    of_turns, of_tokens = turn_gae(rewards, values, turns, mask, lengths, lam=0.5), gae(rewards, values, mask, lengths, lam=0.5)
    assert of_turns.advantages.equal(of_tokens.advantages)
    assert of_turns.returns.equal(of_tokens.returns)


def test_rows_without_a_turn_and_rewards_of_another_precision() -> None:
    mask, turns = torch.tensor([True, True, True, False]), torch.tensor([0, 0, 1, 0])
    rewards, values = torch.tensor([0.0, 0.25, 1.0, 9.0], dtype=torch.float64), torch.tensor([0.5, 9.0, 0.25, 9.0])
    found = turn_gae(rewards, values, turns, mask, torch.tensor([3, 1]), gamma=0.5, lam=0.5)
    first, second = 0.25 + 0.5 * 0.25 - 0.5, 1 - 0.25
    assert found.advantages.tolist() == [first + 0.25 * second, first + 0.25 * second, second, 0.0]
    assert found.returns.tolist() == [first + 0.25 * second + 0.5, first + 0.25 * second + 0.5, 1.0, 0.0]
