"""The functions that a row of the table may name: where each lives, and how a name or a path becomes a function.

"+" joins functions: losses add up ("ppo_clip+kl"), and what follows an estimator works on its token advantages
("group_baseline+whiten"). A recipe may also name a function of its own as "package.module:attr".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from tandem.algos.composition import loss_sum
from tandem.algos.corrections import Correction
from tandem.algos.terms import LossFunction
from tandem.errors import ConfigError
from tandem.registry import resolve

AdvantageFunction = Callable[..., Tensor]
KeepFunction = Callable[[Tensor], bool]

_HERE = "tandem.algos"
LOSSES = {
    **{
        name: f"{_HERE}.policy_losses:{name}"
        for name in (
            *("ppo_clip", "importance_weighted", "reinforce", "truncated_reinforce", "tapered_reinforce", "cispo", "sapo"),
            *("mirror_descent", "dppo_tv", "dppo_kl", "kl_cov", "clip_cov"),
        )
    },
    **{
        name: f"{_HERE}.sequence_losses:{name}"
        for name in ("sequence_clip", "geometric_mean", "variational_reinforce", "squared_preference")
    },
    **{name: f"{_HERE}.extra_terms:{name}" for name in ("squared_log_ratio", "positive_nll", "reverse_kl_policy_gradient")},
    "kl": f"{_HERE}.extra_terms:kl_term",
    "distillation": f"{_HERE}.extra_terms:distillation_term",
    "nll": f"{_HERE}.supervised:negative_log_likelihood",
    "preference": f"{_HERE}.preferences:preference_term",
    "chosen_nll": f"{_HERE}.preferences:chosen_nll",
    **{name: f"{_HERE}.distillation:{name}" for name in ("topk_distillation", "jsd_distillation")},
    "value": f"{_HERE}.values:value_term",
    "implicit_reward": f"{_HERE}.preferences:implicit_reward_term",
    "reward_model": f"{_HERE}.preferences:reward_model_term",
}
ADVANTAGES = {
    **{
        name: f"{_HERE}.advantages:{name}"
        for name in (
            *("group_baseline", "batch_baseline", "no_baseline", "length_weighted_baseline", "nonzero_scaled_baseline"),
            *("mean_normalized", "best_of_group", "decoupled_normalization", "soft_mean_centred"),
        )
    },
    **{
        name: f"{_HERE}.returns:{name}"
        for name in (
            *("discounted_returns", "greedy_baseline", "gae", "turn_gae", "decoupled_gae", "process_and_outcome"),
            *("optimal_token_baseline", "teacher_advantage", "reverse_kl", "whiten"),
        )
    },
}
CORRECTIONS = {
    name: f"{_HERE}.corrections:{name}"
    for name in (
        *("token_tis", "seq_tis", "icepop", "kpop", "token_trust_region", "m2po", "sequence_mask", "seq_mask_tis"),
        *("sequence_trust_region", "off_policy_sequence_mask", "rejection_sampling"),
    )
}
FILTERS = {"varied_rewards": f"{_HERE}.filters:varied_rewards"}
DERIVED = {
    "token_rewards": f"{_HERE}.returns:token_rewards",
    "process_rewards": f"{_HERE}.returns:process_rewards",
    "most_covariant": f"{_HERE}.selection:most_covariant",
    "random_covariant": f"{_HERE}.selection:random_covariant",
}
"""Columns that a function gives from other columns of the whole batch, before it is split."""


def loss_function(name: str) -> LossFunction:
    """The loss `(LossInputs, *, parameters) -> TokenLoss` of this name or path, or the sum of those joined by "+"."""
    return loss_sum(*(cast("LossFunction", _function(part, LOSSES, "loss")) for part in name.split("+")))


def advantage_functions(name: str) -> tuple[AdvantageFunction, ...]:
    """The estimator of this name or path, and what is joined to it by "+"."""
    return tuple(_function(part, ADVANTAGES, "advantage estimator") for part in name.split("+"))


def correction_function(name: str) -> Callable[..., Correction]:
    """The correction of this name or path."""
    return _function(name, CORRECTIONS, "correction")


def keep_function(name: str) -> KeepFunction:
    """The filter `(rewards [n] of one group) -> bool` of this name or path."""
    return cast("KeepFunction", _function(name, FILTERS, "group filter"))


def derived_function(column: str) -> Callable[..., Tensor]:
    """The function that gives this column of `DERIVED`."""
    return _function(column, DERIVED, "derived column")


def _function(name: str, table: Mapping[str, str], kind: str) -> Callable[..., Any]:
    found = resolve(name, table, kind=kind)
    if not callable(found):
        raise ConfigError(f"{kind} {name!r} is {found!r}, which cannot be called")
    return found
