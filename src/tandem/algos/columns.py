"""The columns of an update, made with a configured row: advantages, what is derived from a whole batch, loss weights.

Positional parameters of a function are columns by name: `values_N` is column `values`, and whatever reads `mask_N` is one
of tokens. For each function that gives columns there is one that says which, and one that says what it needs, so that a
pipeline can be planned before a batch exists.

Legend: B rows, N packed tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from tandem.algos.advantages import spread
from tandem.algos.aggregation import loss_weights, mean_over
from tandem.algos.composition import arguments, inputs_of
from tandem.algos.corrections import Correction, combine
from tandem.algos.functions import DERIVED, advantage_functions, correction_function, derived_function, loss_function
from tandem.algos.kl import KLEstimator
from tandem.algos.returns import Credit
from tandem.algos.segments import on_tokens
from tandem.algos.shaping import Resampling, resample_counts
from tandem.algos.terms import scope_of
from tandem.errors import ColumnError
from tandem.types import Algorithm, Json, LossRef, Metrics, Unit

AGGREGATION = ("aggregation", "length_constant")
"""Parameters of every row: how token losses are averaged."""
_OPTIONAL = {"old_logprobs": "reward_kl_coef", "ref_logprobs": "reward_kl_coef", "reward_kl_coef": "reward_kl_target"}
"""Columns that a function may go without, and the parameter that makes it read each."""
_NOT_COLUMNS = frozenset({"groups", "token_counts", "lengths"})


def loss_ref(algorithm: Algorithm) -> LossRef:
    """The loss of a configured algorithm with its parameters, as a TrainEngine takes it."""
    return LossRef(algorithm.loss, arguments(loss_function(algorithm.loss), algorithm.params))


def unit_of(algorithm: Algorithm) -> Unit:
    """What stays together where a step of this algorithm is split."""
    return "group" if scope_of(loss_function(algorithm.loss)) == "group" else "row"


def advantages(algorithm: Algorithm, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B] float32, one an episode; for an estimator that needs no other column."""
    assert algorithm.advantage is not None, f"{algorithm.name} has no advantage estimator"
    function = advantage_functions(algorithm.advantage)[0]
    columns = {"rewards": rewards_B, "groups": groups_B}
    return function(*bound(function, columns), **arguments(function, algorithm.params))


def credit_needs(algorithm: Algorithm) -> frozenset[str]:
    """The columns from which `credit` makes advantages."""
    assert algorithm.advantage is not None, f"{algorithm.name} has no advantage estimator"
    functions = advantage_functions(algorithm.advantage)
    return frozenset({"mask"}).union(*(_columns_of(function, algorithm) for function in functions)) - {"advantages"}


def credit_gives(algorithm: Algorithm) -> frozenset[str]:
    """Column `advantages`, and `returns` where the estimator is one of tokens."""
    assert algorithm.advantage is not None, f"{algorithm.name} has no advantage estimator"
    first = advantage_functions(algorithm.advantage)[0]
    return frozenset({"advantages", "returns"} if get_type_hints(first)["return"] is Credit else {"advantages"})


def credit(
    algorithm: Algorithm, rows: Mapping[str, Tensor], episodes: Mapping[str, Tensor], episode_of_row_B: Tensor
) -> dict[str, Tensor]:
    """The columns of `credit_gives`, [N].

    Args:
        algorithm: a configured row with an estimator.
        rows: columns of the rows by name, with `mask` [N], `lengths` [B] and `groups` int64 [B].
        episodes: what an estimator of episodes reads, one entry an episode: `rewards`, `groups`, `token_counts`, ...
        episode_of_row_B: int64 [B], which episode a row belongs to. An advantage of an episode goes to all its rows.
    """
    assert algorithm.advantage is not None, f"{algorithm.name} has no advantage estimator"
    found: dict[str, Tensor] = {}
    for function in advantage_functions(algorithm.advantage):
        of_tokens = "mask" in map(_column, inputs_of(function))
        columns = {**rows, **found} if of_tokens else episodes
        result = function(*bound(function, columns), **arguments(function, algorithm.params))
        if isinstance(result, Credit):
            found |= result._asdict()
        elif of_tokens:
            found["advantages"] = result
        else:
            found["advantages"] = spread(result[episode_of_row_B], rows["mask"], rows["lengths"])
    return found


def derived_columns(algorithm: Algorithm) -> dict[str, frozenset[str]]:
    """Columns that `derive` can give for this algorithm, and what each needs."""
    names = (algorithm.needs | (credit_needs(algorithm) if algorithm.advantage is not None else frozenset[str]())) & DERIVED.keys()
    found = {name: _columns_of(derived_function(name), algorithm) | {"mask"} for name in sorted(names)}
    if algorithm.params.get("correction"):
        functions = [function for function, _ in corrections_of(algorithm)]
        found["correction"] = frozenset({"mask"}).union(*(_columns_of(function, algorithm) for function in functions))
    return found


def derive(algorithm: Algorithm, column: str, rows: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
    """Token column `column` of a whole batch, [N]; see `derived_columns`. `rows` has `mask` and `lengths` too."""
    if column == "correction":
        found = combine([function(*bound(function, rows), **params) for function, params in corrections_of(algorithm)])
        return found.column, Metrics(found.metrics or {})
    function = derived_function(column)
    return function(*bound(function, rows), **arguments(function, algorithm.params)), Metrics()


@dataclass(frozen=True, slots=True)
class KLControl:
    """An adaptive coefficient, see `kl.adapted_kl_coef`. first: what it begins with."""

    first: float
    target: float
    horizon: int
    estimator: KLEstimator


def kl_controls(algorithm: Algorithm) -> dict[str, KLControl]:
    """The adaptive coefficients that the algorithm reads, by their column: `kl_coef`, `reward_kl_coef`."""
    params = cast("Mapping[str, Any]", algorithm.params)
    return {
        f"{kl}_coef": KLControl(params[f"{kl}_coef"], params[f"{kl}_target"], params[f"{kl}_horizon"], params[f"{kl}_estimator"])
        for kl in ("kl", "reward_kl")
        if params.get(f"{kl}_target") is not None
    }


def reads(algorithm: Algorithm) -> frozenset[str]:
    """Every column that its update reads, or that its advantages or a derived column are made from."""
    credit = credit_needs(algorithm) if algorithm.advantage is not None else frozenset[str]()
    return algorithm.needs.union(credit, *derived_columns(algorithm).values())


def step_needs(algorithm: Algorithm) -> frozenset[str]:
    """The columns that `step_columns` reads."""
    found = {
        "mask": True,
        "correction": algorithm.params.get("denominator") == "kept",
        "resample_counts": bool(algorithm.params.get("resampling")),
        "rewards": "positive_scale" in step_gives(algorithm),
    }
    return frozenset(name for name, needed in found.items() if needed)


def step_gives(algorithm: Algorithm) -> frozenset[str]:
    """The columns that `step_columns` gives; the update reads them beside `algorithm.needs`."""
    positive = "positive_nll" in algorithm.loss.split("+")
    return frozenset({"loss_weights", "positive_scale"} if positive else {"loss_weights"})


def step_columns(algorithm: Algorithm, rows: Mapping[str, Tensor], *, ranks: int = 1) -> dict[str, Tensor]:
    """Column `loss_weights` of the rows of one optimiser step, [N] float32, and `positive_scale` where a term needs it.

    See `aggregation.loss_weights`. With denominator "kept", dropped tokens are not counted. With resampling a row that was
    drawn k times weighs, and is counted, as k rows. `rows` has `lengths` too.
    """
    chosen: dict[str, Any] = {name: algorithm.params[name] for name in AGGREGATION}
    mask_N = rows["mask"]
    if "correction" in step_needs(algorithm):
        mask_N = mask_N & (rows["correction"] != 0)
    repeats_B = rows["resample_counts"] if "resample_counts" in step_needs(algorithm) else torch.ones(len(rows["lengths"]))
    weights_N = loss_weights(mask_N, rows["lengths"], repeats_B=repeats_B, ranks=ranks, **chosen)
    if "positive_scale" not in step_gives(algorithm):
        return {"loss_weights": weights_N}
    positive_N = mask_N & (on_tokens(rows["rewards"], rows["lengths"]) > 0)
    scale_N = mean_over(positive_N, weights_N, repeats_N=on_tokens(repeats_B, rows["lengths"]), ranks=ranks)
    return {"loss_weights": weights_N, "positive_scale": scale_N}


def resampling(algorithm: Algorithm, rewards_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """How often each episode is drawn, float32 [B]; for an algorithm whose parameter `resampling` is set."""
    method, weight_pow = cast("Resampling", algorithm.params["resampling"]), cast("float", algorithm.params["resampling_pow"])
    return resample_counts(rewards_B, uniforms_B, method=method, weight_pow=weight_pow)


def bound(function: Callable[..., Any], columns: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Its positional arguments: `values_N` is columns["values"]; one with a default may be missing, any other is a ColumnError."""
    parameters = inspect.signature(function).parameters
    needed = [_column(name) for name in inputs_of(function) if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in columns]:
        raise ColumnError(f"{function.__name__} reads column {missing[0]!r} and the batch has {sorted(columns)}")
    return [columns.get(_column(name)) for name in inputs_of(function)]


def _column(parameter: str) -> str:
    """`values_N` and `values` both name column `values`."""
    return re.sub(r"_[A-Z0-9]+$", "", parameter)


def _columns_of(function: Callable[..., Any], algorithm: Algorithm) -> frozenset[str]:
    """Columns that its positional parameters name, and those that may be missing where a parameter of the row asks for them."""
    parameters = inspect.signature(function).parameters
    asked = {column for column, parameter in _OPTIONAL.items() if algorithm.params.get(parameter)}
    names = {_column(name): parameters[name].default is inspect.Parameter.empty for name in inputs_of(function)}
    return frozenset(column for column, needed in names.items() if needed or column in asked) - _NOT_COLUMNS


def corrections_of(algorithm: Algorithm) -> list[tuple[Callable[..., Correction], dict[str, Any]]]:
    chosen = as_mapping(algorithm.params["correction"])
    return [(correction_function(name), dict(cast("Mapping[str, Any]", params))) for name, params in chosen.items()]


def as_mapping(correction: Json) -> dict[str, Json]:
    """`icepop` is short for `{icepop: {}}`."""
    if isinstance(correction, str):
        return {correction: {}}
    return {} if correction is None else dict(cast("Mapping[str, Json]", correction))
