"""The range of every parameter: what lies outside is refused by its name, and what lies on the edge is allowed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.algos import advantages, corrections, distillation, preferences, returns, selection, shaping
from tandem.algos.kl import kl_divergence
from tandem.algos.ratios import check_clip
from tandem.algos.terms import LossInputs

ONE, REWARDS, GROUPS = torch.ones(2), torch.tensor([1.0, 0.0]), torch.tensor([3, 3])
MASK, LENGTHS = torch.tensor([True, True]), torch.tensor([1, 1])
COLUMNS = ("old_logprobs", "advantages", "ref_logprobs", "teacher_logprobs", "most_covariant", "random_covariant", "positive_scale")
NAN = float("nan")


def loss(name: str, **params: Any) -> None:
    module, _, function = name.partition(".")
    columns = {**dict.fromkeys(COLUMNS, torch.zeros(2)), "rewards": REWARDS}
    columns |= {"teacher_topk_logprobs": torch.zeros(2, 1), "teacher_topk_ids": torch.zeros(2, 1, dtype=torch.int64)}
    inputs = LossInputs(-ONE, MASK, LENGTHS, columns, at_topk=-torch.ones(2, 1))
    getattr(importlib.import_module(f"tandem.algos.{module}"), function)(inputs, **params)


LOSSES: list[tuple[str, str, tuple[float, ...], tuple[float, ...]]] = [
    # loss, parameter, values outside, values on the edge
    *((f"policy_losses.{name}", "clip_low", (-0.1, 1.1, NAN), (0.0, 1.0)) for name in ("ppo_clip", "cispo", "clip_cov")),
    *((f"policy_losses.{name}", "clip_high", (-0.1, NAN), (0.0,)) for name in ("ppo_clip", "cispo", "clip_cov")),
    *(
        (f"policy_losses.{name}", side, (-0.1, NAN), (0.0,))
        for name in ("dppo_tv", "dppo_kl")
        for side in ("clip_low", "clip_high")
    ),
    *((f"policy_losses.{name}", "log_ratio_clamp", (0.0, -1.0), ()) for name in ("ppo_clip", "cispo", "clip_cov")),
    *((f"policy_losses.{name}", "ratio_cap", (0.9, NAN), (1.0,)) for name in ("dppo_tv", "dppo_kl")),
    ("policy_losses.ppo_clip", "dual_clip", (1.0, 0.5, NAN), (1.001,)),
    ("policy_losses.ppo_clip", "ratio_cap", (1.2, 0.5, NAN), (1.201,)),  # clip_high is 0.2
    ("policy_losses.importance_weighted", "log_ratio_clamp", (0.0, -1.0, NAN, float("inf")), ()),
    ("policy_losses.truncated_reinforce", "ratio_low", (-0.1, 1.1, NAN), (0.0, 1.0)),  # ratio_high is 1
    ("policy_losses.sapo", "tau_pos", (0.0, -1.0, NAN), ()),
    ("policy_losses.sapo", "tau_neg", (0.0, -1.0, NAN), ()),
    ("policy_losses.mirror_descent", "dro_beta", (0.0, -1.0, NAN), ()),
    ("policy_losses.kl_cov", "cov_kl_coef", (-0.1, NAN), (0.0,)),
    ("sequence_losses.sequence_clip", "clip_low", (-0.1, 1.1, NAN), (0.0, 1.0)),
    ("sequence_losses.sequence_clip", "clip_high", (-0.1, NAN), (0.0,)),
    ("sequence_losses.sequence_clip", "log_ratio_clamp", (0.0, NAN), ()),
    ("sequence_losses.geometric_mean", "clip_low", (-0.1, NAN), (0.0,)),
    ("sequence_losses.geometric_mean", "clip_high", (-0.1, NAN), (0.0,)),
    *(("sequence_losses.variational_reinforce", name, (0.0, NAN), ()) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
    ("sequence_losses.squared_preference", "eta", (0.0, NAN), ()),
    ("extra_terms.kl_term", "kl_coef", (-0.1,), (0.0,)),
    ("extra_terms.distillation_term", "distillation_coef", (-0.1, NAN), (0.0,)),
    ("extra_terms.squared_log_ratio", "kl_tau", (-0.1, NAN), (0.0,)),
    ("extra_terms.positive_nll", "positive_nll_weight", (-0.1, NAN), (0.0,)),
    ("extra_terms.reverse_kl_policy_gradient", "trust_region_low", (-0.1, NAN), (0.0,)),
    ("distillation.topk_distillation", "distillation_coef", (-0.1, NAN), (0.0,)),
    ("distillation.topk_distillation", "mixed_weight", (-0.1, 1.1, NAN), (0.0, 1.0)),
    ("distillation.topk_distillation", "topk", (0,), (1,)),
    ("distillation.jsd_distillation", "distillation_coef", (-0.1, NAN), (0.0,)),
    ("distillation.jsd_distillation", "jsd_beta", (-0.1, 1.1, NAN), (0.0, 1.0)),
]


@pytest.mark.parametrize(("name", "parameter", "outside", "edge"), LOSSES)
def test_a_parameter_of_a_loss(name: str, parameter: str, outside: tuple[float, ...], edge: tuple[float, ...]) -> None:
    for value in outside:
        with pytest.raises(ValueError, match=parameter):
            loss(name, **{parameter: value})
    for value in edge:
        loss(name, **{parameter: value})


def test_none_turns_a_bound_off() -> None:
    loss("policy_losses.ppo_clip", dual_clip=None, ratio_cap=None, log_ratio_clamp=None)
    for name in ("dppo_tv", "dppo_kl"):
        loss(f"policy_losses.{name}", ratio_cap=None, log_ratio_clamp=None)
    check_clip(0.0, 0.0)


OTHERS: list[tuple[Any, dict[str, Any], str]] = [
    (lambda **p: advantages.group_baseline(REWARDS, GROUPS, **p), {"std_eps": (-1e-9, NAN)}, "0.0"),
    (lambda **p: advantages.soft_mean_centred(REWARDS, **p), {"soft_mean_beta": (0.0, -1.0, NAN)}, "1e-3"),
    (lambda **p: returns.discounted_returns(ONE, MASK, LENGTHS, **p), {"gamma": (-0.1, 1.1, NAN)}, "0.0 1.0"),
    (lambda **p: returns.greedy_baseline(ONE, REWARDS, MASK, LENGTHS, **p), {"gamma": (-0.1, 1.1, NAN)}, "0.0 1.0"),
    (lambda **p: returns.gae(ONE, ONE, MASK, LENGTHS, **p), {"gamma": (-0.1, 1.1, NAN), "lam": (-0.1, 1.1, NAN)}, "0.0 1.0"),
    (
        lambda **p: returns.decoupled_gae(ONE, ONE, MASK, LENGTHS, **p),
        {"gamma": (-0.1, 1.1), "lam_value": (-0.1, 1.1), "lam_policy": (-0.1, 1.1)},
        "0.0 1.0",
    ),
    (lambda **p: returns.decoupled_gae(ONE, ONE, MASK, LENGTHS, **p), {"length_adaptive_alpha": (0.0, -1.0, NAN)}, "1e-3"),
    (
        lambda **p: returns.process_and_outcome(ONE, ONE, GROUPS, MASK, LENGTHS, **p),
        {"process_coef": (-0.1, NAN), "outcome_coef": (-0.1, NAN)},
        "0.0",
    ),
    (lambda **p: returns.optimal_token_baseline(ONE, -ONE, ONE, GROUPS, MASK, LENGTHS, **p), {"baseline_eps": (-0.1, NAN)}, "0.0"),
    (lambda **p: returns.reverse_kl(ONE, -ONE, -ONE, MASK, **p), {"distillation_coef": (-0.1, NAN)}, "0.0"),
    (lambda **p: returns.whiten(REWARDS, MASK, **p), {"whiten_eps": (-0.1, NAN)}, "0.0"),
    (lambda **p: selection.most_covariant(ONE, ONE, MASK, **p), {"cov_frac": (0.0, -0.1, 1.1, NAN)}, "1e-3 1.0"),
    (lambda **p: selection.random_covariant(ONE, ONE, MASK, ONE, **p), {"cov_frac": (0.0, -0.1, 1.1, NAN)}, "1e-3 1.0"),
    (lambda **p: selection.random_covariant(ONE, ONE, MASK, ONE, **p), {"cov_low": (5.0, 6.0, NAN)}, "4.9"),
    (lambda **p: preferences.preference_loss(-torch.ones(1, 2), -torch.ones(1, 2), **p), {"beta": (0.0, -1.0, NAN)}, "1e-3"),
    (
        lambda **p: preferences.preference_loss(-torch.ones(1, 2), -torch.ones(1, 2), **p),
        {"label_smoothing": (-0.1, 0.5, NAN)},
        "0.0 0.49",
    ),
    (lambda **p: distillation.generalized_jsd(torch.ones(2, 3), torch.ones(2, 3), **p), {"jsd_beta": (-0.1, 1.1, NAN)}, "0.0 1.0"),
    (
        lambda **p: distillation.generalized_jsd(torch.ones(2, 3), torch.ones(2, 3), **p),
        {"jsd_temperature": (0.0, -1.0, NAN)},
        "1e-3",
    ),
    (lambda **p: shaping.overlong_penalty(REWARDS, ONE, max_len=8, **p), {"buffer_len": (0, -1, 9)}, "1 8"),
    (lambda **p: shaping.resampling_weights(REWARDS, **p), {"weight_pow": (0.0, -1.0, NAN)}, "1e-3"),
]


@pytest.mark.parametrize(("call", "outside", "edge"), OTHERS)
def test_a_parameter_of_another_function(call: Any, outside: dict[str, tuple[float, ...]], edge: str) -> None:
    for parameter, values in outside.items():
        for value in values:
            with pytest.raises(ValueError, match=parameter.removeprefix("weight_").partition("_value")[0]):
                call(**{parameter: value})
        for text in edge.split():
            call(**{parameter: type(values[0])(float(text))})


ROW = (-ONE, -ONE, MASK, LENGTHS)
CHOICES: list[tuple[str, Callable[[Any], object]]] = [
    ("scale", lambda value: advantages.group_baseline(REWARDS, GROUPS, scale=value)),
    ("singleton", lambda value: advantages.group_baseline(REWARDS, GROUPS, singleton=value)),
    ("scale", lambda value: advantages.best_of_group(REWARDS, GROUPS, scale=value)),
    ("singleton", lambda value: returns.optimal_token_baseline(ONE, -ONE, ONE, GROUPS, MASK, LENGTHS, singleton=value)),
    ("singleton", lambda value: advantages.decoupled_normalization(REWARDS[:, None], GROUPS, singleton=value)),
    ("ratio", lambda value: corrections.sequence_mask(*ROW, ratio=value)),
    ("weight", lambda value: corrections.sequence_mask(*ROW, weight=value)),
    ("divergence", lambda value: corrections.token_trust_region(*ROW[:3], divergence=value)),
    ("direction", lambda value: distillation.topk_kl_at(-torch.ones(2, 1), -torch.ones(2, 1), direction=value)),
    ("estimator", lambda value: kl_divergence(-ONE, -ONE, estimator=value)),
    ("gradient", lambda value: kl_divergence(-ONE, -ONE, gradient=value, old_logprobs_N=-ONE)),
    ("preference", lambda value: preferences.preference_loss(-torch.ones(1, 2), -torch.ones(1, 2), preference=value)),
    ("ratio", lambda value: loss("sequence_losses.sequence_clip", ratio=value)),
    ("gradient", lambda value: loss("sequence_losses.sequence_clip", gradient=value)),
    ("sides", lambda value: loss("policy_losses.dppo_tv", sides=value)),
    ("surrogate", lambda value: loss("policy_losses.dppo_tv", surrogate=value)),
    ("surrogate", lambda value: loss("policy_losses.dppo_kl", surrogate=value)),
    ("method", lambda value: shaping.resampling_weights(REWARDS, method=value)),
]


@pytest.mark.parametrize(("parameter", "call"), CHOICES)
def test_a_choice_that_there_is_not(parameter: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=parameter):
        call("sideways")


def test_bounds_of_a_correction_and_counts_of_a_step_are_finite_and_positive() -> None:
    for delta in (NAN, float("inf")):
        with pytest.raises(ValueError, match="delta"):
            corrections.off_policy_sequence_mask(-ONE, -ONE, ONE, MASK, LENGTHS, delta=delta)
    for bad in ("0.5_inf", "-1_2", "nan"):
        with pytest.raises(ValueError, match="threshold"):
            corrections.rejection_sampling(*ROW, mode="token_k1", threshold=bad)
