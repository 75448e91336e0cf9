"""Losses against a teacher as the update calls them: on looked-up logprobs, against the golden numbers of whole logits."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.algos.aggregation import aggregate, loss_weights
from tandem.algos.distillation import (
    generalized_jsd,
    jensen_shannon,
    jsd_distillation,
    topk_distillation,
    topk_kl,
    topk_kl_at,
    with_rest,
)
from tandem.algos.table import configure
from tandem.algos.terms import LossInputs
from tandem.errors import ColumnError, ConfigError

GOLDEN = Path(__file__).parents[1] / "golden/cases"


def inputs(student_NK: Tensor, teacher_NK: Tensor, mask: Tensor) -> LossInputs:
    columns = {"teacher_topk_ids": torch.zeros_like(teacher_NK, dtype=torch.int64), "teacher_topk_logprobs": teacher_NK}
    return LossInputs(torch.zeros(len(mask)), mask, torch.tensor([len(mask)]), columns, at_topk=student_NK)


def cases(kind: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"distillation__{kind}.json").read_text())


@pytest.mark.parametrize("case", cases("distillation"), ids=lambda case: case["id"])
def test_the_loss_on_looked_up_logprobs_is_the_golden_one(case: dict[str, Any]) -> None:
    logits = torch.tensor(case["inputs"]["student_logits"], dtype=torch.float64).flatten(0, 1).requires_grad_()
    teacher = torch.tensor(case["inputs"]["teacher_topk_logprobs"], dtype=torch.float64).flatten(0, 1)
    ids = torch.tensor(case["inputs"]["teacher_topk_ids"]).long().flatten(0, 1)
    mask = torch.tensor(case["inputs"]["mask"]).bool().flatten()
    params = case["params"]
    how: dict[str, Any] = {"direction": params["kl_type"], "floor": params["kl_type"] == "forward"}
    if "mixed_kl_weight" in params:
        how["mixed_weight"] = params["mixed_kl_weight"]
    looked_up = logits.log_softmax(-1).gather(1, ids)
    garbage = torch.where(mask[:, None], looked_up, torch.nan)
    result = topk_distillation(inputs(garbage, torch.where(mask[:, None], teacher, torch.inf), mask), **how)
    total = aggregate(result.loss, loss_weights(mask, torch.tensor([len(mask)])).double(), mask)
    assert total.item() == pytest.approx(case["outputs"]["loss"], rel=1e-5, abs=1e-6)
    assert 0 < result.metrics["student_mass"].value <= 1


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_the_divergence_is_exact_on_the_whole_vocabulary_and_never_above_it(beta: float) -> None:
    seeded = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(6, 9, generator=seeded, dtype=torch.float64).requires_grad_()
    teacher_logits = 2 * torch.randn(6, 9, generator=seeded, dtype=torch.float64)
    teacher, ids = teacher_logits.log_softmax(-1).topk(9)
    mask = torch.tensor([True, True, False, True, True, True])
    want = generalized_jsd(logits, teacher_logits, jsd_beta=beta)[mask]
    got: list[Tensor] = []
    for top in (9, 4, 1):
        student = logits.log_softmax(-1).gather(1, ids[:, :top])
        got.append(jsd_distillation(inputs(student, teacher[:, :top], mask), jsd_beta=beta).loss)
    torch.testing.assert_close(got[0][mask], want, atol=1e-5, rtol=0)
    for more, fewer in pairwise(got):  # merging tokens never makes a divergence larger
        assert bool((fewer[mask] <= more[mask] + 1e-6).all())
        assert bool((fewer[mask] >= 0).all())
        assert bool((fewer[~mask] == 0).all())
    exact, found = (torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (want, got[0]))
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=0)


def test_what_is_less_likely_than_the_floor_counts_as_this_likely_without_gradient() -> None:
    student = torch.tensor([[-0.1, -3.0, -30.0], [-0.5, -1.5, -2.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-0.2, -40.0, -2.0], [-0.4, -2.0, -2.5]], dtype=torch.float64)
    at_floor = student.detach().clone().requires_grad_()
    lifted_teacher = torch.tensor([[-0.2, -10.0, -2.0], [-0.4, -2.0, -2.5]], dtype=torch.float64)
    lifted = torch.cat([at_floor[:, :2], torch.tensor([[-10.0], [-2.0]], dtype=torch.float64)], 1)
    for direction in ("forward", "reverse", "mixed"):
        found = topk_kl_at(student, teacher, direction=direction, logprob_floor=-10.0, floor=False)
        want = topk_kl_at(lifted, lifted_teacher, direction=direction, floor=False)
        torch.testing.assert_close(found.loss, want.loss)
        assert torch.equal(found.student_mass, topk_kl_at(student, teacher).student_mass)
        (got,) = torch.autograd.grad(found.loss.sum(), student)
        (wanted,) = torch.autograd.grad(want.loss[0], at_floor)
        torch.testing.assert_close(got[0], wanted[0])
        assert got[0, 2] == 0
        assert bool((got[1] != 0).all())
    logits, ids = torch.tensor([[0.0, 3.0, -9.0, 1.0]]), torch.tensor([[1, 3, 2]])
    whole = topk_kl(logits, teacher[:1].float(), ids, logprob_floor=-5.0).loss
    assert torch.equal(whole, topk_kl_at(logits.log_softmax(-1).gather(-1, ids), teacher[:1].float(), logprob_floor=-5.0).loss)
    assert not torch.equal(whole, topk_kl(logits, teacher[:1].float(), ids).loss)
    mask = torch.tensor([True, True])
    term = topk_distillation(inputs(student, teacher, mask), logprob_floor=-10.0)
    torch.testing.assert_close(
        term.loss, topk_kl_at(student, teacher, logprob_floor=-10.0).loss.float().double(), rtol=1e-6, atol=0
    )


def test_a_batch_without_the_teacher_s_tokens_is_refused() -> None:
    ones = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ColumnError, match="teacher_topk_ids"):
        topk_distillation(LossInputs(torch.zeros(1), ones.bool(), ones, {}))


def test_what_each_row_reads_says_where_its_responses_come_from() -> None:
    teacher = {"teacher_topk_ids", "teacher_topk_logprobs"}
    every = {"tokens", "mask", "temperature"}
    assert configure("kd").needs == configure("gkd").needs == every | teacher
    assert configure("opd_topk").needs == configure("opd_jsd").needs == every | teacher | {"rollout_logprobs"}
    assert configure("opd_loss").needs == every | {"teacher_logprobs", "rollout_logprobs"}
    assert "teacher_logprobs" in configure("grpo_opd").needs


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("kd", {"topk": 0}, "topk must be at least 1"),
        ("gkd", {"topk": -1}, "topk must be at least 1"),
        ("kd", {"distillation_coef": -1.0}, "must not be negative"),
        ("kd", {"mixed_weight": 2.0}, r"in \[0, 1\]"),
        ("kd", {"logprob_floor": 0.0}, "logprob_floor must be negative"),
        ("gkd", {"jsd_beta": 1.5}, r"in \[0, 1\]"),
        ("opd_loss", {"distillation_estimator": "k1", "distillation_gradient": "direct"}, "does not work inside a loss"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configure(name, params)


STUDENT, TEACHER = torch.tensor([[0.5, 0.25], [0.1, 0.1]]).double().log(), torch.tensor([[0.25, 0.5], [0.6, 0.3]]).double().log()


@pytest.mark.parametrize(
    ("direction", "want"),
    [
        # sum T log(T / S): 0.25 log 0.5 + 0.5 log 2, and of the second 0.6 log 6 + 0.3 log 3; the other way round likewise
        ("forward", [0.25 * math.log(2), 0.6 * math.log(6) + 0.3 * math.log(3)]),
        ("reverse", [0.25 * math.log(2), -0.1 * math.log(18)]),
        ("mixed", [0.25 * math.log(2), 0.75 * (0.6 * math.log(6) + 0.3 * math.log(3)) - 0.25 * 0.1 * math.log(18)]),
    ],
)
def test_the_divergence_over_the_top_k_by_hand(direction: Any, want: list[float]) -> None:
    found = topk_kl_at(STUDENT, TEACHER, direction=direction, mixed_weight=0.75, floor=False)
    assert found.loss.tolist() == pytest.approx(want)
    assert found.student_mass.tolist() == pytest.approx([0.75, 0.2])
    floored = topk_kl_at(STUDENT, TEACHER, direction=direction, mixed_weight=0.75)
    assert floored.loss.tolist() == pytest.approx([max(value, 0.0) for value in want])
    mask = torch.tensor([True, True])
    term = topk_distillation(
        inputs(STUDENT, TEACHER, mask), direction=direction, mixed_weight=0.75, floor=False, distillation_coef=2.0
    )
    assert term.terms["distillation"].tolist() == pytest.approx([2 * value for value in want])
    assert term.metrics.values_by_name() == pytest.approx({"kl_distillation": sum(want) / 2, "student_mass": 0.475})


def test_the_jensen_shannon_divergence_by_hand() -> None:
    s, t = torch.tensor([[0.8, 0.2]]).double(), torch.tensor([[0.4, 0.6]]).double()
    middle = [0.25 * 0.4 + 0.75 * 0.8, 0.25 * 0.6 + 0.75 * 0.2]
    of_teacher = 0.4 * math.log(0.4 / middle[0]) + 0.6 * math.log(0.6 / middle[1])
    of_student = 0.8 * math.log(0.8 / middle[0]) + 0.2 * math.log(0.2 / middle[1])
    assert jensen_shannon(s.log(), t.log(), jsd_beta=0.25).item() == pytest.approx(0.25 * of_teacher + 0.75 * of_student)
    assert jensen_shannon(s.log(), t.log(), jsd_beta=0.0).item() == pytest.approx(0.4 * math.log(0.5) + 0.6 * math.log(3))
    assert jensen_shannon(s.log(), t.log(), jsd_beta=1.0).item() == pytest.approx(0.8 * math.log(2) + 0.2 * math.log(1 / 3))
    hot = generalized_jsd(4 * s.log(), 4 * t.log(), jsd_beta=0.25, jsd_temperature=4.0)
    assert hot.item() == pytest.approx(0.25 * of_teacher + 0.75 * of_student)


def test_all_other_tokens_count_as_one() -> None:
    found = with_rest(torch.tensor([[0.5, 0.25], [0.6, 0.4]]).double().log()).exp()
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.25, 0.25], [0.6, 0.4, 1e-6]]).double(), rtol=1e-6, atol=1e-9)
    mask = torch.tensor([True, False])
    term = jsd_distillation(inputs(STUDENT, TEACHER, mask), jsd_beta=0.25, distillation_coef=2.0)
    want = jensen_shannon(with_rest(STUDENT), with_rest(TEACHER), jsd_beta=0.25)
    assert term.terms["distillation"].tolist() == pytest.approx([2 * want[0].item(), 0.0])
    assert term.metrics.values_by_name() == pytest.approx({"kl_distillation": want[0].item(), "student_mass": 0.75})


def test_the_share_of_the_teacher_is_exact_in_float64() -> None:
    s, t, beta = torch.tensor([[0.8, 0.2]]).double(), torch.tensor([[0.4, 0.6]]).double(), 0.3
    middle = beta * t + (1 - beta) * s
    want = beta * (t * (t / middle).log()).sum() + (1 - beta) * (s * (s / middle).log()).sum()
    assert jensen_shannon(s.log(), t.log(), jsd_beta=beta).item() == pytest.approx(want.item(), rel=1e-12)


def test_logits_are_looked_up_at_the_teachers_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0]]).double().requires_grad_()
    teacher, ids = torch.tensor([[0.5, 0.25]]).double().log(), torch.tensor([[1, 2]])
    student = logits.detach().log_softmax(-1)[:, 1:]
    for weight in (0.0, 0.25, 1.0):
        want = topk_kl_at(student, teacher, direction="mixed", mixed_weight=weight, floor=False)
        found = topk_kl(logits, teacher, ids, direction="mixed", mixed_weight=weight, floor=False)
        assert found.loss.item() == pytest.approx(want.loss.item())
        assert found.student_mass.item() == pytest.approx(student.exp().sum().item())
        assert not found.student_mass.requires_grad


def test_a_tokens_sum_is_bounded_on_either_side_and_what_is_measured_is_not() -> None:
    student = torch.tensor([[0.25], [0.75], [0.5]]).double().log().requires_grad_()
    teacher, mask = torch.tensor([[0.5], [0.5], [0.5]]).double().log(), torch.ones(3, dtype=torch.bool)
    given = inputs(student, teacher, mask)
    free = topk_distillation(given, floor=False)
    term = topk_distillation(given, floor=False, loss_clamp=0.25, distillation_coef=2.0)
    assert free.loss.tolist() == pytest.approx([0.5 * math.log(2), 0.5 * math.log(2 / 3), 0])
    assert term.loss.tolist() == pytest.approx([2 * 0.25, math.log(2 / 3), 0])
    assert topk_distillation(given, floor=False, loss_clamp=0.125).loss.tolist() == [0.125, -0.125, 0]
    assert term.metrics.values_by_name() == free.metrics.values_by_name()
    (found,) = torch.autograd.grad(term.loss.sum(), student)
    assert found.flatten().tolist() == pytest.approx([0, -1.0, -1.0])
