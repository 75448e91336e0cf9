"""Distillation from a teacher's distribution at each token. What needs only sampled logprobs is in extra_terms.py and returns.py.

A loss reads the teacher's K likeliest tokens (teacher_topk_ids, teacher_topk_logprobs) and the student's logprobs of those.

Legend: N tokens, V vocabulary, K the teacher's most likely tokens; S student, T teacher.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tandem.algos.checks import checked, keep
from tandem.algos.ratios import bounded, check, check_choice
from tandem.algos.terms import LossInputs, TokenLoss, masked_mean
from tandem.types import Metrics

Direction = Literal["forward", "reverse", "mixed"]

_REST = 1e-6
"""The least probability of all tokens outside the top k together."""


class TopKLoss(NamedTuple):
    """loss: [N], with gradient. student_mass: [N], the probability that the student gives to the teacher's top k."""

    loss: Tensor
    student_mass: Tensor


@checked
def topk_kl(
    logits_NV: Tensor,
    teacher_logprobs_NK: Tensor,
    teacher_ids_NK: Tensor,
    *,
    direction: Direction = "forward",
    mixed_weight: float = 0.5,
    floor: bool = True,
    logprob_floor: float | None = None,
) -> TopKLoss:
    """`topk_kl_at` for a student whose logits are at hand."""
    logprobs_NK = torch.log_softmax(logits_NV, -1).gather(-1, teacher_ids_NK)
    return topk_kl_at(
        logprobs_NK,
        teacher_logprobs_NK,
        direction=direction,
        mixed_weight=mixed_weight,
        floor=floor,
        logprob_floor=logprob_floor,
    )


def topk_kl_at(
    logprobs_NK: Tensor,
    teacher_logprobs_NK: Tensor,
    *,
    direction: Direction = "forward",
    mixed_weight: float = 0.5,
    floor: bool = True,
    logprob_floor: float | None = None,
) -> TopKLoss:
    """Forward: sum_k T (log T - log S); reverse: sum_k S (log S - log T); mixed: a weighted sum of the two, forward first: [N].

    Over the teacher's top k, not renormalised (verl, NeMo-RL), so that reverse and mixed are lowered by probability that
    leaves the top k. floor: not below 0 where what is missing makes the sum so. logprob_floor: what is less likely, by the
    student or the teacher, counts as this likely, without gradient (verl's log_prob_min_clamp); None is off.
    """
    check_choice("direction", direction, get_args(Direction))
    check(0 <= mixed_weight <= 1, f"mixed_weight must be in [0, 1], got {mixed_weight}")
    check(logprob_floor is None or logprob_floor < 0, f"logprob_floor must be negative (None is off), got {logprob_floor}")
    student, teacher = logprobs_NK, teacher_logprobs_NK
    if logprob_floor is not None:
        student, teacher = student.clamp(min=logprob_floor), teacher.clamp(min=logprob_floor)
    gap = teacher - student
    forward, backward = (teacher.exp() * gap).sum(-1), (-student.exp() * gap).sum(-1)
    match direction:
        case "forward":
            loss = forward
        case "reverse":
            loss = backward
        case "mixed":
            loss = mixed_weight * forward + (1 - mixed_weight) * backward
    return TopKLoss(loss.clamp(min=0) if floor else loss, logprobs_NK.detach().exp().sum(-1))


@checked
def generalized_jsd(logits_NV: Tensor, teacher_logits_NV: Tensor, *, jsd_beta: float = 0.5, jsd_temperature: float = 1.0) -> Tensor:
    """JSD = beta KL(T, M) + (1 - beta) KL(S, M), M = beta T + (1 - beta) S, beta = jsd_beta: [N] (GKD, arXiv 2306.13649).

    At beta 0 it is KL(T, S), at beta 1 KL(S, T). jsd_temperature divides both logits.
    """
    check(jsd_temperature > 0, f"jsd_temperature must be positive, got {jsd_temperature}")
    student, teacher = (torch.log_softmax(logits / jsd_temperature, -1) for logits in (logits_NV, teacher_logits_NV))
    return jensen_shannon(student, teacher, jsd_beta=jsd_beta)


def jensen_shannon(logprobs_NV: Tensor, teacher_logprobs_NV: Tensor, *, jsd_beta: float = 0.5) -> Tensor:
    """`generalized_jsd` of log-probabilities: [N]."""
    check(0 <= jsd_beta <= 1, f"jsd_beta must be in [0, 1], got {jsd_beta}")
    student, teacher = logprobs_NV, teacher_logprobs_NV
    if jsd_beta in (0, 1):
        return _kl(teacher, student) if jsd_beta == 0 else _kl(student, teacher)
    shares = torch.tensor([jsd_beta, 1 - jsd_beta], dtype=student.dtype).log()
    middle = torch.logaddexp(teacher + shares[0], student + shares[1])
    return jsd_beta * _kl(teacher, middle) + (1 - jsd_beta) * _kl(student, middle)


def with_rest(logprobs_NK: Tensor) -> Tensor:
    """[N, K + 1]: the log-probability of all other tokens together added, so that the whole is a distribution again."""
    rest_N = (1 - logprobs_NK.exp().sum(-1)).clamp(min=_REST)
    return torch.cat([logprobs_NK, rest_N.log()[:, None]], -1)


def topk_distillation(
    inputs: LossInputs,
    *,
    topk: int = 64,
    direction: Direction = "forward",
    mixed_weight: float = 0.5,
    floor: bool = True,
    logprob_floor: float | None = None,
    loss_clamp: float | None = None,
    distillation_coef: float = 1.0,
) -> TokenLoss:
    """distillation_coef KL over the teacher's top k, S student, T teacher, term "distillation" (verl, NeMo-RL).

    forward: sum_k T (log T - log S). reverse: sum_k S (log S - log T). mixed: mixed_weight times the one and the rest of
    the other. Not renormalised: reverse and mixed are lowered, too, by probability that leaves the top k. Reads
    teacher_topk_ids and teacher_topk_logprobs.

    topk: how many tokens the teacher gives. floor: a token's sum is not below 0. logprob_floor: less likely tokens count as
    this likely; None is off. loss_clamp: bounds a token's sum on either side (verl's loss_max_clamp); None is off.
    """
    found = topk_kl_at(
        inputs.topk_logprobs,
        _teacher(inputs, topk),
        direction=direction,
        mixed_weight=mixed_weight,
        floor=floor,
        logprob_floor=logprob_floor,
    )
    return _term(inputs, found.loss, found.student_mass, distillation_coef, loss_clamp)


def jsd_distillation(inputs: LossInputs, *, topk: int = 64, jsd_beta: float = 0.5, distillation_coef: float = 1.0) -> TokenLoss:
    """distillation_coef (beta KL(T, M) + (1 - beta) KL(S, M)), M = beta T + (1 - beta) S, term "distillation" (GKD, 2306.13649).

    beta = jsd_beta; at 0 it is KL(T, S), at 1 KL(S, T). S student, T teacher, each over the teacher's top k and all other
    tokens as one: exact with topk the size of the vocabulary, and below it otherwise. Reads teacher_topk_ids and
    teacher_topk_logprobs.

    topk: how many tokens the teacher gives.
    """
    student, teacher = inputs.topk_logprobs, _teacher(inputs, topk)
    loss = jensen_shannon(with_rest(student), with_rest(teacher), jsd_beta=jsd_beta)
    return _term(inputs, loss, student.detach().exp().sum(-1), distillation_coef)


def _teacher(inputs: LossInputs, topk: int) -> Tensor:
    check(topk >= 1, f"topk must be at least 1, got {topk}")
    return inputs.token("teacher_topk_logprobs")


def _term(inputs: LossInputs, loss_N: Tensor, mass_N: Tensor, coef: float, clamp: float | None = None) -> TokenLoss:
    check(coef >= 0, f"distillation_coef must not be negative, got {coef}")
    metrics = {"kl_distillation": masked_mean(loss_N, inputs.mask), "student_mass": masked_mean(mass_N, inputs.mask)}
    return TokenLoss({"distillation": coef * keep(bounded(loss_N, clamp), inputs.mask)}, Metrics(metrics))


def _kl(logprobs_NV: Tensor, other_NV: Tensor) -> Tensor:
    return (logprobs_NV.exp() * (logprobs_NV - other_NV)).sum(-1)
