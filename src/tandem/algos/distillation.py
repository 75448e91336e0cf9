"""Distillation from a teacher's distribution at each token. What needs only sampled logprobs is in extra_terms.py and returns.py.

Legend: N tokens, V vocabulary, K the teacher's most likely tokens; S student, T teacher.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tandem.algos.ratios import check


class TopKLoss(NamedTuple):
    """loss: [N], with gradient. student_mass: [N], the probability that the student gives to the teacher's top k."""

    loss: Tensor
    student_mass: Tensor


def topk_kl(
    logits_NV: Tensor,
    teacher_logprobs_NK: Tensor,
    teacher_ids_NK: Tensor,
    *,
    direction: Literal["forward", "reverse", "mixed"] = "forward",
    mixed_weight: float = 0.5,
    floor: bool = True,
) -> TopKLoss:
    """Forward: sum_k T (log T - log S); reverse: sum_k S (log S - log T); mixed: a weighted sum of the two, forward first: [N].

    Over the teacher's top k, not renormalised (verl, NeMo-RL). floor: not below 0 where what is missing makes the sum so.
    """
    check(0 <= mixed_weight <= 1, f"mixed_weight must be in [0, 1], got {mixed_weight}")
    logprobs_NK = torch.log_softmax(logits_NV, -1).gather(-1, teacher_ids_NK)
    gap = teacher_logprobs_NK - logprobs_NK
    forward, backward = (teacher_logprobs_NK.exp() * gap).sum(-1), (-logprobs_NK.exp() * gap).sum(-1)
    match direction:
        case "forward":
            loss = forward
        case "reverse":
            loss = backward
        case "mixed":
            loss = mixed_weight * forward + (1 - mixed_weight) * backward
    return TopKLoss(loss.clamp(min=0) if floor else loss, logprobs_NK.detach().exp().sum(-1))


def generalized_jsd(logits_NV: Tensor, teacher_logits_NV: Tensor, *, jsd_beta: float = 0.5, jsd_temperature: float = 1.0) -> Tensor:
    """JSD = beta KL(T, M) + (1 - beta) KL(S, M), M = beta T + (1 - beta) S, beta = jsd_beta: [N] (GKD, arXiv 2306.13649).

    At beta 0 it is KL(T, S), at beta 1 KL(S, T). jsd_temperature divides both logits.
    """
    check(0 <= jsd_beta <= 1, f"jsd_beta must be in [0, 1], got {jsd_beta}")
    check(jsd_temperature > 0, f"jsd_temperature must be positive, got {jsd_temperature}")
    student, teacher = (torch.log_softmax(logits / jsd_temperature, -1) for logits in (logits_NV, teacher_logits_NV))
    if jsd_beta in (0, 1):
        return _kl(teacher, student) if jsd_beta == 0 else _kl(student, teacher)
    shares = torch.tensor([jsd_beta, 1 - jsd_beta], dtype=student.dtype).log()
    middle = torch.logaddexp(teacher + shares[0], student + shares[1])
    return jsd_beta * _kl(teacher, middle) + (1 - jsd_beta) * _kl(student, middle)


def _kl(logprobs_NV: Tensor, other_NV: Tensor) -> Tensor:
    return (logprobs_NV.exp() * (logprobs_NV - other_NV)).sum(-1)
