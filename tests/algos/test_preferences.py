"""The losses on pairs as the update calls them: on rows of tokens, in any order, against the golden numbers of whole pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.algos.aggregation import aggregate, loss_weights
from tandem.algos.columns import loss_ref, unit_of
from tandem.algos.composition import loss_sum
from tandem.algos.functions import loss_function
from tandem.algos.policy_losses import ppo_clip
from tandem.algos.preferences import (
    chosen_nll,
    implicit_reward_accuracy,
    implicit_reward_loss,
    implicit_reward_term,
    preference_loss,
    preference_term,
    reward_model_loss,
    reward_model_term,
)
from tandem.algos.sequence_losses import sequence_clip
from tandem.algos.table import ALGORITHMS, configure, learns_values
from tandem.algos.terms import LossInputs, TokenLoss, scope_of
from tandem.errors import ColumnError, ConfigError
from tandem.types import LossRef
from tests.algos.pipeline import REQUIRED

CASES: list[dict[str, Any]] = [
    case
    for kind in ("dpo", "sppo")
    for case in json.loads((Path(__file__).parents[1] / f"golden/cases/dpo__{kind}.json").read_text())
    if "completion_lens" not in case["inputs"]
]
ROWS = [name for name, row in ALGORITHMS.items() if row.loss.startswith("preference")]


def on_tokens(sums: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """A row whose counted tokens add up to each sum, with a prompt token and one in the middle that do not count."""
    shares = [torch.tensor([99.0, 0.5, 99.0, 0.3, 0.2], dtype=torch.float64), torch.tensor([99.0, 1.0], dtype=torch.float64)]
    masks = [torch.tensor([False, True, False, True, True]), torch.tensor([False, True])]
    return [shares[i % 2] * value for i, value in enumerate(sums)], [masks[i % 2] for i in range(len(sums))]


def run(logprobs: Tensor, ref: Tensor, loss: LossRef, order: list[int]) -> tuple[TokenLoss, Tensor, Tensor]:
    """Loss, its total, and its gradient by (pair, side); logprobs and ref are [P, 2] sums, order one of the 2 P rows."""
    x, masks = on_tokens(logprobs.flatten().tolist())
    f, _ = on_tokens(ref.flatten().tolist())
    rows = [row.clone().requires_grad_() for row in x]
    lengths, mask = torch.tensor([len(rows[i]) for i in order]), torch.cat([masks[i] for i in order])
    columns = {"ref_logprobs": torch.cat([f[i] for i in order]), "chosen": torch.tensor([i % 2 == 0 for i in order])}
    inputs = LossInputs(
        torch.cat([rows[i] for i in order]), mask, lengths, columns, groups=torch.tensor([7 - i // 2 for i in order])
    )
    result = loss_function(loss.name)(inputs, **loss.params)
    total = aggregate(result.loss, loss_weights(mask, lengths, aggregation="seq-mean-token-mean").double(), mask)
    gradients = torch.autograd.grad(total, rows)
    for gradient, counted in zip(gradients, masks, strict=True):
        assert bool((gradient[~counted] == 0).all())
        assert bool((gradient[counted] == gradient[counted][0]).all())
    return result, total, torch.stack([g[m][0] for g, m in zip(gradients, masks, strict=True)]).reshape(-1, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_pair_of_rows_costs_what_the_golden_pair_costs(case: dict[str, Any]) -> None:
    logprobs, ref = (torch.tensor(case["inputs"][f"{who}_seq_logps"], dtype=torch.float64) for who in ("policy", "ref"))
    named = {"beta": "beta", "loss_type": "preference", "label_smoothing": "label_smoothing"}
    loss = LossRef("preference", {named[key]: value for key, value in case["params"].items()})
    rows = 2 * len(logprobs)
    for order in (list(range(rows)), list(range(rows - 1, -1, -1)), sorted(range(rows), key=lambda i: (i * 7) % rows)):
        result, total, gradient = run(logprobs, ref, loss, order)
        want = case["outputs"]
        tight: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(total, torch.tensor(want["loss"], dtype=torch.float64), **tight)
        torch.testing.assert_close(gradient, torch.tensor(want["grad_policy_seq_logps"], dtype=torch.float64), **tight)
        metrics = result.metrics.values_by_name()
        if "chosen_rewards" in want:
            chosen, rejected = want["chosen_rewards"], want["rejected_rewards"]
            ahead = sum(c > r for c, r in zip(chosen, rejected, strict=True))
            assert metrics["preference_accuracy"] == ahead / len(chosen) == want["metrics"]["accuracy"]
            assert metrics["reward_chosen"] == pytest.approx(sum(chosen) / len(chosen), abs=1e-6)
            assert metrics["reward_rejected"] == pytest.approx(sum(rejected) / len(rejected), abs=1e-6)
        assert metrics["reward_margin"] == pytest.approx(metrics["reward_chosen"] - metrics["reward_rejected"])


def test_ipo_may_compare_means_over_a_response() -> None:
    logprobs, ref = torch.tensor([[-3.0, -4.0]], dtype=torch.float64), torch.tensor([[-6.0, -2.0]], dtype=torch.float64)
    loss = loss_ref(configure("ipo", {"per_token": True, "beta": 0.5}))
    _, total, _ = run(logprobs, ref, loss, [0, 1])  # three counted tokens and one
    assert total.item() == pytest.approx((3 / 3 - -2 / 1 - 1) ** 2)


def test_the_chosen_response_may_be_imitated_beside() -> None:
    """The mean over pairs of its mean token NLL, whatever the lengths."""
    logprobs = torch.tensor([[-3.0, -4.0], [-6.0, -2.0]], dtype=torch.float64)  # chosen responses have three counted tokens
    plain, both = (run(logprobs, logprobs, loss_ref(configure("dpo", {"nll_coef": c})), [3, 0, 2, 1])[1:] for c in (0.0, 0.5))
    assert (both[0] - plain[0]).item() == pytest.approx(0.5 * (3 / 3 + 6 / 3) / 2)
    torch.testing.assert_close(both[1] - plain[1], torch.tensor([[-0.5 / 6, 0.0]] * 2, dtype=torch.float64))


def test_at_the_reference_no_pair_is_told_apart() -> None:
    same = torch.tensor([[-3.0, -4.0], [-1.0, -2.0]], dtype=torch.float64)
    result, total, _ = run(same, same, loss_ref(configure("dpo")), [0, 1, 2, 3])
    assert total.item() == pytest.approx(torch.log(torch.tensor(2.0)).item())
    assert result.metrics["preference_accuracy"].value == 0
    assert result.metrics["preference_accuracy"].count == 2


@pytest.mark.parametrize(
    ("groups", "chosen"),
    [([0, 0, 1], [True, False, True]), ([0, 0], [True, True]), ([0, 0, 0], [True, False, False]), ([0, 1], [True, False])],
)
def test_a_group_that_is_no_pair_is_refused(groups: list[int], chosen: list[bool]) -> None:
    num = len(groups)
    columns = {"ref_logprobs": torch.zeros(num), "chosen": torch.tensor(chosen)}
    ones = torch.ones(num, dtype=torch.int64)
    with pytest.raises(ColumnError, match="a pair is a group of two rows"):
        preference_term(LossInputs(torch.zeros(num), ones.bool(), ones, columns, groups=torch.tensor(groups)))


@pytest.mark.parametrize("name", ROWS)
def test_each_row_compares_whole_groups_with_the_reference(name: str) -> None:
    row = configure(name)
    assert row.needs == {"tokens", "mask", "temperature", "chosen", "ref_logprobs"}
    assert unit_of(row) == "group"
    with pytest.raises(ConfigError, match="no mean over pairs"):
        configure(name, {"aggregation": "token-mean"})


def test_a_sum_has_the_scope_of_its_widest_part() -> None:
    assert scope_of(ppo_clip) == "token"
    assert scope_of(loss_sum(ppo_clip, sequence_clip)) == "row"
    assert scope_of(loss_sum(preference_term, ppo_clip)) == "group"
    assert unit_of(configure("gspo")) == "row"


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("dpo", {"beta": 0.0}, "must be positive"),
        ("cdpo", {"label_smoothing": 0.5}, r"in \[0, 0.5\)"),
        ("hinge", {"label_smoothing": 0.1}, "has no label_smoothing"),
        ("dpo", {"per_token": True}, "leave its lengths out"),
        ("dpo", {"nll_coef": -1.0}, "must not be negative"),
        ("dpo", {"betta": 0.1}, "did you mean beta"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configure(name, params)


PAIR = torch.tensor([[-3.0, -4.0], [-1.0, -2.5]], dtype=torch.float64)
REF = torch.tensor([[-3.5, -3.0], [-1.5, -3.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("preference", "smoothing", "want"),
    [
        # gains 0.5 and -1, 0.5 and 0.5, so h is 1.5 and 0; beta 0.5, so the margin of ipo is 1
        ("sigmoid", 0.0, [math.log1p(math.exp(-0.75)), math.log(2)]),
        ("sigmoid", 0.1, [0.9 * math.log1p(math.exp(-0.75)) + 0.1 * math.log1p(math.exp(0.75)), math.log(2)]),
        ("robust", 0.1, [(0.9 * math.log1p(math.exp(-0.75)) - 0.1 * math.log1p(math.exp(0.75))) / 0.8, math.log(2)]),
        ("ipo", 0.0, [0.25, 1.0]),
        ("hinge", 0.0, [0.25, 1.0]),
        ("sppo_hard", 0.0, [0.25 + 0.0, 0.25 + 2.25]),
    ],
)
def test_what_a_pair_costs(preference: Any, smoothing: float, want: list[float]) -> None:
    found = preference_loss(PAIR, REF, preference=preference, beta=0.5, label_smoothing=smoothing)
    assert found.loss.tolist() == pytest.approx(want)
    assert found.rewards.tolist() == [[0.25, -0.5], [0.25, 0.25]]
    assert found.accuracy.item() == 0.5  # equal rewards do not tell them apart


def test_a_hinge_never_pays() -> None:
    far = preference_loss(torch.tensor([[9.0, 0.0]]), torch.zeros(1, 2), preference="hinge", beta=0.5)
    assert far.loss.tolist() == [0.0]
    lengths = torch.tensor([[2.0, 4.0], [1.0, 1.0]])
    means = preference_loss(PAIR, REF, lengths, preference="ipo", beta=0.5)
    assert means.loss.tolist() == [(0.25 + 0.25 - 1) ** 2, 1.0]
    assert means.rewards.tolist() == [[0.25, -0.5], [0.25, 0.25]]
    with pytest.raises(ValueError, match="leave its lengths out"):
        preference_loss(PAIR, REF, lengths, preference="hinge")


def test_a_reward_model_learns_which_is_better() -> None:
    scores = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
    plain = reward_model_loss(scores)
    assert plain.loss.tolist() == pytest.approx([math.log1p(math.exp(-0.5)), math.log1p(math.exp(2.0))])
    assert plain.accuracy.item() == 0.5
    margin = reward_model_loss(scores, torch.tensor([0.25, 1.0]), centre_coef=0.1)
    want = [math.log1p(math.exp(-0.25)) + 0.1 * 1.5**2, math.log1p(math.exp(3.0)) + 0.1 * 2**2]
    assert margin.loss.tolist() == pytest.approx(want)
    assert not reward_model_loss(scores.requires_grad_()).rewards.requires_grad


def test_a_score_is_the_value_at_the_last_counted_token_of_a_response() -> None:
    """Of rows in any order: pair 4 has scores 1.0 and 0.5 with a margin of 0.25, pair 2 has 0.0 and 2.0 with one of 1."""
    mask = torch.tensor([False, True, True, True, False, True, False, True, False, False, True])
    lengths = torch.tensor([3, 2, 3, 3])
    values = torch.tensor([9.0, 9.0, 0.5, 0.0, 9.0, 9.0, 9.0, 1.0, 9.0, 9.0, 2.0], requires_grad=True)
    columns = {"chosen": torch.tensor([False, True, True, False]), "margins": torch.tensor([0.25, 1.0, 0.25, 1.0])}
    inputs = LossInputs(None, mask, lengths, columns, groups=torch.tensor([4, 2, 4, 2]), values=values)
    found = reward_model_term(inputs, centre_coef=0.1)
    one, other = math.log1p(math.exp(-0.25)) + 0.1 * 1.5**2, math.log1p(math.exp(3.0)) + 0.1 * 2**2
    want = torch.where(mask, torch.tensor([one] * 3 + [other] * 2 + [one] * 3 + [other] * 3), 0.0)
    torch.testing.assert_close(found.terms["preference"], want)
    metrics = {"preference_accuracy": 0.5, "reward_chosen": 0.5, "reward_rejected": 1.25, "reward_margin": -0.75}
    assert found.metrics.values_by_name() == metrics
    (gradient,) = torch.autograd.grad(found.loss.sum(), values)
    assert gradient.nonzero()[:, 0].tolist() == [2, 3, 7, 10]
    with pytest.raises(ConfigError, match="must not be negative"):
        configure("reward_model", {"centre_coef": -0.1})


def test_only_the_rows_of_values_learn_values() -> None:
    assert [name for name, row in ALGORITHMS.items() if learns_values(configure(name, REQUIRED.get(name)))] == [
        "value",
        "reward_model",
    ]


def test_an_implicit_reward_is_a_logit_of_the_outcome() -> None:
    found = implicit_reward_loss(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 0.0]), implicit_beta=0.5)
    assert found.tolist() == pytest.approx([math.log1p(math.exp(-1.0)), math.log1p(math.exp(-0.5))])


def test_how_well_an_implicit_reward_tells_right_from_wrong() -> None:
    """Group 1: 2 and -1 are right, 1 and -2 wrong: 3 of 4 pairs. Group 2: right below wrong. Group 3: no pair."""
    sums = torch.tensor([2.0, 1.0, -1.0, -2.0, 0.5, 0.75, 3.0])
    correct, groups = torch.tensor([1, 0, 1, 0, 1, 0, 1]), torch.tensor([1, 1, 1, 1, 2, 2, 3])
    pairs, signs = implicit_reward_accuracy(sums, correct, groups)
    assert pairs.item() == pytest.approx((4 * 0.75 + 2 * 0.0) / 6)
    assert signs.item() == pytest.approx(4 / 7)
    assert pairs.dtype == signs.dtype == torch.float64
    nothing, _ = implicit_reward_accuracy(sums, torch.ones(7), groups)
    assert nothing.isnan()
    equal, absolute = implicit_reward_accuracy(torch.zeros(2), torch.tensor([1, 0]), torch.tensor([1, 1]))
    assert (equal.item(), absolute.item()) == (0.0, 0.5)


def test_an_implicit_process_model_learns_from_outcomes() -> None:
    """Sums of x - f over counted tokens are 1.5, -1 and 0, and the last row has none that counts."""
    mask, lengths = torch.tensor([True, False, True, True, True, False]), torch.tensor([3, 1, 1, 1])
    x, f = torch.tensor([-1.0, 9.0, -1.0, -2.0, -1.0, 9.0]), torch.tensor([-2.0, 5.0, -1.5, -1.0, -1.0, 5.0])
    columns = {"ref_logprobs": f, "rewards": torch.tensor([1.0, 0.5, 0.0, 1.0])}
    found = implicit_reward_term(LossInputs(x, mask, lengths, columns), implicit_beta=0.5)
    want = [math.log1p(math.exp(-0.75)), math.log1p(math.exp(0.5)), math.log(2)]
    assert found.terms["implicit_reward"].tolist() == pytest.approx([want[0], 0, want[0], want[1], want[2], 0])
    assert (found.metrics["implicit_accuracy"].value, found.metrics["implicit_accuracy"].count) == (pytest.approx(2 / 3), 3)
    assert scope_of(implicit_reward_term) == "row"
    with pytest.raises(ValueError, match="implicit_beta"):
        implicit_reward_term(LossInputs(x, mask, lengths, columns), implicit_beta=0.0)


def pair(x: list[float], f: list[float], chosen: Tensor, groups: list[int]) -> LossInputs:
    num = len(x)
    columns = {"ref_logprobs": torch.tensor(f), "chosen": chosen}
    ones = torch.ones(num, dtype=torch.int64)
    return LossInputs(torch.tensor(x), ones.bool(), ones, columns, groups=torch.tensor(groups))


def test_a_column_of_numbers_says_which_is_chosen() -> None:
    found = preference_term(pair([-1.0, -2.0], [-1.5, -1.0], torch.tensor([1.0, 0.0]), [3, 3]), beta=1.0)
    assert found.loss.tolist() == pytest.approx([math.log1p(math.exp(-1.5))] * 2)


def test_one_group_that_is_no_pair_is_enough_to_refuse() -> None:
    for chosen in ([1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]):
        with pytest.raises(ColumnError, match="a pair is a group of two rows"):
            preference_term(pair([0.0] * 4, [0.0] * 4, torch.tensor(chosen), [3, 3, 4, 4]))


def test_a_masked_token_costs_nothing_and_rewards_are_added_up_in_float64() -> None:
    big = pair([2.0**24, 0.0, 1.0, 0.0], [0.0] * 4, torch.tensor([1.0, 0.0, 1.0, 0.0]), [3, 3, 4, 4])
    found = preference_term(big, beta=1.0).metrics
    assert (found["reward_chosen"].value, found["reward_margin"].value) == ((2**24 + 1) / 2, (2**24 + 1) / 2)
    mask, lengths = torch.tensor([False, True, True, False]), torch.tensor([2, 2])
    columns = {"ref_logprobs": torch.zeros(4), "chosen": torch.tensor([True, False])}
    masked = LossInputs(-torch.ones(4), mask, lengths, columns, groups=torch.tensor([3, 3]))
    assert preference_term(masked).terms["preference"].tolist() == pytest.approx([0.0, math.log(2), math.log(2), 0.0])


def test_a_pair_may_imitate_its_chosen_response_too() -> None:
    given = pair([-1.0, -2.0], [-1.5, -1.0], torch.tensor([1.0, 0.0]), [3, 3])
    found = chosen_nll(given, nll_coef=0.25)
    assert found.terms["nll"].tolist() == [0.5, 0.0]  # doubled, since half of all rows are chosen
    assert found.metrics.values_by_name() == {"nll_chosen": 1.0}
    nothing = chosen_nll(given, nll_coef=0.0)
    assert (dict(nothing.terms), nothing.metrics.values_by_name()) == ({}, {})


def test_a_sum_above_zero_says_right() -> None:
    columns = {"ref_logprobs": torch.zeros(1), "rewards": torch.ones(1)}
    given = LossInputs(torch.tensor([0.5]), torch.tensor([True]), torch.tensor([1]), columns)
    assert implicit_reward_term(given).metrics["implicit_accuracy"].value == 1
    _, signs = implicit_reward_accuracy(torch.zeros(2), torch.ones(2), torch.tensor([1, 1]))
    assert signs.item() == 0


def test_whether_a_models_own_output_is_finite_is_for_the_loss_to_show() -> None:
    scores = torch.tensor([[torch.nan, 1.0]]).requires_grad_()
    assert reward_model_loss(scores).loss.isnan().all()
