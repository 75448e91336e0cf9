"""Credit token by token, by hand: rows of three, two and one counted tokens, with a masked one among the first."""

from __future__ import annotations

import pytest
import torch

from tandem.algos import returns

LENGTHS = torch.tensor([4, 2, 1])
MASK = torch.tensor([True, False, True, True, True, True, True])
REWARDS = torch.tensor([1.0, -1.0, 0.5])
TOKENS = torch.tensor([0.0, 9.0, 0.5, 1.0, 0.0, -1.0, 0.5])
VALUES = torch.tensor([0.5, 9.0, 0.25, 1.0, -0.5, 0.0, 0.5])


def test_a_reward_stands_on_the_last_counted_token_less_the_penalty_of_each() -> None:
    mask = torch.tensor([True, False, True, False, True, True, False])
    assert returns.token_rewards(REWARDS, mask, LENGTHS).tolist() == [0, 0, 1, 0, 0, -1, 0]
    old, ref = torch.full((7,), -1.0), torch.tensor([-1.5, 9.0, -1.0, 9.0, -3.0, -1.0, 9.0])
    found = returns.token_rewards(REWARDS, mask, LENGTHS, old, ref, reward_kl_coef=0.5)
    assert found.tolist() == [-0.25, 0, 1, 0, -1, -1, 0]
    squared = returns.token_rewards(REWARDS, mask, LENGTHS, old, ref, reward_kl_coef=0.5, reward_kl_estimator="k2")
    assert squared.tolist() == [-0.0625, 0, 1, 0, -1, -1, 0]


def test_returns_and_the_greedy_baseline() -> None:
    found = returns.discounted_returns(TOKENS, MASK, LENGTHS, gamma=0.5)
    assert found.returns.tolist() == found.advantages.tolist() == [0.5, 0, 1.0, 1.0, -0.5, -1.0, 0.5]
    greedy = returns.greedy_baseline(TOKENS, torch.tensor([1.0, 0.5, 0.0]), MASK, LENGTHS)
    assert greedy.returns.tolist() == [1.5, 0, 1.5, 1.0, -1.0, -1.0, 0.5]
    assert greedy.advantages.tolist() == [0.5, 0, 0.5, 0.0, -1.5, -1.5, 0.5]


def test_gae_looks_one_counted_token_ahead() -> None:
    """delta: -0.5 + 0.25 / 2, 0.5 + 1 / 2 - 0.25, 0; then 0.5 + 0 / 2, -1; then 0. A = delta + A_next / 4."""
    found = returns.gae(TOKENS, VALUES, MASK, LENGTHS, gamma=0.5, lam=0.5)
    assert found.advantages.tolist() == [-0.375 + 0.75 / 4, 0, 0.75, 0, 0.25, -1, 0]
    assert found.returns.tolist() == [0.3125, 0, 1.0, 1.0, -0.25, -1, 0.5]
    one_step = returns.gae(TOKENS, VALUES, MASK, LENGTHS, gamma=0.5, lam=0.0)
    assert one_step.advantages.tolist() == [-0.375, 0, 0.75, 0, 0.5, -1, 0]


def test_decoupled_gae_has_a_lambda_for_each_purpose() -> None:
    found = returns.decoupled_gae(TOKENS, VALUES, MASK, LENGTHS, gamma=0.5, lam_value=0.5, lam_policy=0.0)
    assert found.returns.tolist() == [0.3125, 0, 1.0, 1.0, -0.25, -1, 0.5]
    assert found.advantages.tolist() == [-0.375, 0, 0.75, 0, 0.5, -1, 0]
    adaptive = returns.decoupled_gae(TOKENS, VALUES, MASK, LENGTHS, gamma=1.0, length_adaptive_alpha=2 / 3)
    # 1 - 1 / (alpha n): 0.5 for three tokens, 0.25 for two, 0 for one (-0.5 is clamped)
    deltas = [-0.25, 1.25, 0.0, 0.5, -1.0, 0.0]
    want = [deltas[0] + 0.5 * deltas[1], 0, deltas[1], 0, deltas[3] + 0.25 * deltas[4], -1, 0]
    assert adaptive.advantages.tolist() == pytest.approx(want)
    assert adaptive.returns.tolist() == [1.5, 0, 1.5, 1.0, -1.0, -1, 0.5]


def test_process_and_outcome_leave_the_row_itself_out() -> None:
    """Rows 0 and 1 are a group, row 2 is alone. Outcome: 2 (r - mean of both) on the last token, so 2 and -2."""
    process = torch.tensor([1.0, 9.0, 2.0, 3.0, 0.0, 1.0, 7.0])
    groups = torch.tensor([5, 5, 6])
    outcome = returns.process_and_outcome(process, REWARDS, groups, MASK, LENGTHS, process_coef=0.0, outcome_coef=1.0)
    assert outcome.advantages.tolist() == [2, 0, 2, 2, -2, -2, 0]
    # Process: means 2 and 0.5, so 2 r - 2.5 on each token, summed from the end.
    both = returns.process_and_outcome(process, REWARDS, groups, MASK, LENGTHS, process_coef=2.0, outcome_coef=1.0)
    values = [2 * (2 * r - 2.5) for r in (1.0, 2.0, 3.0)], [2 * (2 * r - 2.5) for r in (0.0, 1.0)]
    first, second = ([sum(each[i:]) for i in range(len(each))] for each in values)
    assert both.advantages.tolist() == pytest.approx([first[0] + 2, 0, first[1] + 2, first[2] + 2, second[0] - 2, second[1] - 2, 0])
    assert both.returns.tolist() == both.advantages.tolist()
    three = returns.process_and_outcome(process, REWARDS, torch.zeros(3).long(), MASK, LENGTHS, process_coef=0.0, outcome_coef=1.0)
    assert three.advantages[[0, 4, 6]].tolist() == pytest.approx([1.25, -1.75, 0.5])  # r less the mean of the other two


def test_a_row_without_a_counted_token_is_no_companion() -> None:
    mask = torch.tensor([True, True, False])
    lengths, groups = torch.tensor([1, 1, 1]), torch.zeros(3, dtype=torch.int64)
    found = returns.process_and_outcome(torch.zeros(3), torch.tensor([1.0, 0.0, -9.0]), groups, mask, lengths, outcome_coef=1.0)
    assert found.advantages.tolist() == [1.0, -1.0, 0.0]


def test_the_optimal_token_baseline_weighs_returns_by_the_length_of_the_score() -> None:
    """Weights 1 - 2 p + sum p^2 add up along a row: with p = 0.5 and sums of 0.5, 0.5 a token; here 0.5 and 0.25 by row."""
    old = torch.full((7,), 0.5, dtype=torch.float64).log()
    squared = torch.tensor([0.5, 9.0, 0.5, 0.5, 0.25, 0.25, 0.5], dtype=torch.float64)
    found = returns.optimal_token_baseline(TOKENS.double(), old, squared, torch.tensor([5, 5, 6]), MASK, LENGTHS)
    # returns 1.5 1.5 1 and -1 -1; weights 0.5 1 1.5 and 0.25 0.5
    baseline = (1.5 * 0.5 - 1 * 0.25) / 0.75, (1.5 * 1 - 1 * 0.5) / 1.5
    want = [1.5 - baseline[0], 0, 1.5 - baseline[1], 1.0, -1 - baseline[0], -1 - baseline[1], 0]
    assert found.advantages.tolist() == pytest.approx(want, rel=1e-6)
    assert found.returns.tolist() == [1.5, 0, 1.5, 1.0, -1.0, -1.0, 0.5]
    damped = returns.optimal_token_baseline(
        TOKENS.double(), old, squared, torch.tensor([5, 5, 6]), MASK, LENGTHS, baseline_eps=0.75
    )
    assert damped.advantages[0].item() == pytest.approx(1.5 - baseline[0] / 2)


def test_a_teacher_is_credit_token_by_token() -> None:
    old, teacher = torch.tensor([-1.0, 9.0, -2.0]), torch.tensor([-2.0, -9.0, -0.5])
    mask = torch.tensor([True, False, True])
    assert returns.teacher_advantage(old, teacher, mask).tolist() == [-1.0, 0.0, 1.5]
    assert returns.teacher_advantage(old, teacher, mask, advantage_clamp=0.75).tolist() == [-0.75, 0.0, 0.75]
    found = returns.reverse_kl(torch.tensor([1.0, 9.0, 1.0]), old, teacher, mask, distillation_coef=2.0)
    assert found.tolist() == [1.0 - 2.0, 0.0, 1.0 + 3.0]
    assert not returns.teacher_advantage(old.requires_grad_(), teacher, mask).requires_grad


def test_whitening_by_hand() -> None:
    values, mask = torch.tensor([1.0, 2.0, 9.0, 6.0]), torch.tensor([True, True, False, True])
    # mean 3, squares 4 1 9: 14 over 2, or over 3
    assert returns.whiten(values, mask).tolist() == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 0, 3 / 7**0.5])
    biased = (14 / 3) ** 0.5
    assert returns.whiten(values, mask, whiten_ddof=0).tolist() == pytest.approx([-2 / biased, -1 / biased, 0, 3 / biased])
    assert returns.whiten(values, mask, whiten_eps=2.0).tolist() == pytest.approx([-2 / 3, -1 / 3, 0, 1])
    assert returns.whiten(values, mask, whiten_std=False).tolist() == [-2, -1, 0, 3]
    assert returns.whiten(values, torch.zeros(4, dtype=torch.bool)).tolist() == [0, 0, 0, 0]
    assert returns.whiten(values, torch.tensor([False, True, False, False])).tolist() == [0, 0, 0, 0]
    assert returns.whiten(torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool)).tolist() == [0, 0, 0]
    assert returns.whiten(values, mask).dtype == torch.float32


def test_an_implicit_process_model_pays_its_log_ratio() -> None:
    prm, ref, mask = torch.tensor([-1.0, 9.0, -2.0]), torch.tensor([-2.0, 9.0, -1.5]), torch.tensor([True, False, True])
    assert returns.process_rewards(prm, ref, mask, implicit_beta=0.5).tolist() == [0.5, 0.0, -0.25]


def test_gamma_and_lambda_have_their_own_places() -> None:
    """delta_t = r_t + 0.5 V_next - V_t, A_t = delta_t + 0.5 * 0.25 A_next."""
    found = returns.gae(TOKENS, VALUES, MASK, LENGTHS, gamma=0.5, lam=0.25)
    assert found.advantages.tolist() == [-0.375 + 0.75 / 8, 0, 0.75, 0, 0.5 - 1 / 8, -1, 0]
    both = returns.decoupled_gae(TOKENS, VALUES, MASK, LENGTHS, gamma=0.5, lam_value=0.25, lam_policy=1.0)
    assert both.returns.tolist() == found.returns.tolist()
    assert both.advantages.tolist() == [-0.375 + 0.75 / 2, 0, 0.75, 0, 0.0, -1, 0]


def test_adaptive_lambdas_have_the_precision_of_the_values() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    found = returns.decoupled_gae(rewards, values, torch.ones(3, dtype=torch.bool), torch.tensor([3]), length_adaptive_alpha=0.7)
    lam = 1 - 1 / (0.7 * 3)
    assert found.advantages.tolist() == pytest.approx([lam**2, lam, 1.0], rel=1e-14)


def test_equal_rewards_of_a_process_give_exactly_zero_and_float32() -> None:
    tenths = torch.full((7,), 0.1)
    found = returns.process_and_outcome(tenths, torch.full((3,), 0.7), torch.zeros(3).long(), MASK, LENGTHS)
    assert found.advantages.tolist() == [0.0] * 7
    assert found.advantages.dtype == torch.float32
    for num in (5, 6, 7, 11):
        every, one = torch.ones(num, dtype=torch.bool), torch.ones(num, dtype=torch.int64)
        for reward in (0.1, 0.7, 1e6 + 0.1):
            equal = torch.full((num,), reward, dtype=torch.float64)
            found = returns.process_and_outcome(equal, equal, torch.zeros(num).long(), every, one)
            assert found.advantages.tolist() == [0.0] * num


def test_rows_of_one_token_are_companions() -> None:
    every, one = torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.int64)
    found = returns.optimal_token_baseline(
        torch.tensor([1.0, 0.0]), -torch.ones(2), torch.ones(2), torch.zeros(2).long(), every, one
    )
    assert found.advantages.tolist() == pytest.approx([0.5, -0.5])


def test_a_row_alone_has_no_baseline() -> None:
    mask, lengths = torch.tensor([True, True, False]), torch.tensor([2, 1])
    for groups in ([3, 4], [3, 3]):  # alone in its group, or beside a row without a counted token
        ids = torch.tensor(groups)
        process = returns.process_and_outcome(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1.0, 0.0]), ids, mask, lengths)
        assert process.advantages.tolist() == [0.0, 0.0, 0.0]
        token = returns.optimal_token_baseline(torch.tensor([0.0, 1.0, 9.0]), -torch.ones(3), torch.ones(3), ids, mask, lengths)
        assert token.advantages.tolist() == [0.0, 0.0, 0.0]
        raw = returns.optimal_token_baseline(
            torch.tensor([0.0, 1.0, 9.0]), -torch.ones(3), torch.ones(3), ids, mask, lengths, singleton="reward"
        )
        assert raw.advantages.tolist() == [1.0, 1.0, 0.0]


def test_whitening_sums_in_float64() -> None:
    """Two values of 4,096 make ones vanish in a sum of squares in float32; what is left here is one rounding, of 2^-24."""
    values = torch.ones(4096)
    values[1::2] = -1
    values[:2] *= 4096
    exact = values.double() / (values.double().square().sum() / 4095 + 1e-8).sqrt()
    whitened = returns.whiten(values, torch.ones(4096, dtype=torch.bool)).double()
    assert ((whitened - exact) / exact).abs().max() <= 2**-24


def test_whitening_of_two_and_of_equal_values_in_float64() -> None:
    both = torch.ones(2, dtype=torch.bool)
    assert returns.whiten(torch.tensor([0.0, 1.0]), both).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    for num in (3, 6, 7):  # 0.1 + 0.1 + 0.1 is not 3 times 0.1
        equal = torch.full((num,), 0.1, dtype=torch.float64)
        assert returns.whiten(equal, torch.ones(num, dtype=torch.bool)).tolist() == [0.0] * num
