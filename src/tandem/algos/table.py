"""The algorithm table: one row per algorithm, data and no code. rows.py holds them, notes.py says when to choose which.

A row names an advantage estimator, a policy loss and an aggregation, and says which columns an update reads; the
pipeline is derived from those. Its parameters are the keyword-only parameters of its functions, with the row's own
defaults where they differ. "+" joins functions: losses add up ("ppo_clip+kl"), and what follows an estimator works on
its token advantages ("group_baseline+whiten"). Positional parameters of an estimator are columns by name: `values_N`
is column `values`, and whatever reads `mask_N` is one of tokens. To add an algorithm: write its functions in their
modules, name them here, add a row. A recipe may also name a function or a whole row of its own as "package.module:attr".
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, cast, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from tandem.algos.advantages import spread
from tandem.algos.aggregation import loss_weights, mean_over
from tandem.algos.composition import arguments, inputs_of, loss_sum, parameters_of, parts_of, types_of
from tandem.algos.corrections import Correction, combine
from tandem.algos.returns import Credit
from tandem.algos.rows import EVERY_UPDATE, ROWS
from tandem.algos.segments import on_tokens
from tandem.algos.terms import LossFunction, LossInputs, scope_of
from tandem.errors import ConfigError
from tandem.registry import resolve
from tandem.types import Algorithm, Json, LossRef, Metrics

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
            *("discounted_returns", "greedy_baseline", "gae", "decoupled_gae", "process_and_outcome"),
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
    "most_covariant": f"{_HERE}.selection:most_covariant",
    "random_covariant": f"{_HERE}.selection:random_covariant",
}
"""Columns that a function gives from other columns of the whole batch, before it is split."""

COLUMN_OF: dict[str, str] = {"kl_coef": "ref_logprobs", "correction": "correction"}
"""Parameters that make the update read one more column when they are set."""

_AGGREGATION = ("aggregation", "length_constant")
_POLICY_TYPES: dict[str, Any] = {
    "correction": str | dict[str, dict[str, Any]] | None,
    "denominator": Literal["all", "kept"],
    "bypass": bool,
}
"""What every row with an advantage takes. correction: see `configure`. denominator: whether tokens that a correction drops
are counted. bypass: the sampler's logprobs stand for old_logprobs, and no pass of the trainer computes them."""
_POLICY_DEFAULTS: dict[str, Json] = {"correction": None, "denominator": "all", "bypass": False}
_NOT_COLUMNS = frozenset({"groups", "token_counts", "lengths"})


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


def _function(name: str, table: Mapping[str, str], kind: str) -> Callable[..., Any]:
    found = resolve(name, table, kind=kind)
    if not callable(found):
        raise ConfigError(f"{kind} {name!r} is {found!r}, which cannot be called")
    return found


# ------------------------------------------------------------------------------------------------- using a row


def loss_ref(algorithm: Algorithm) -> LossRef:
    """The loss of a configured algorithm with its parameters, as a TrainEngine takes it."""
    return LossRef(algorithm.loss, arguments(loss_function(algorithm.loss), algorithm.params))


def advantages(algorithm: Algorithm, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B] float32, one an episode; for an estimator that needs no other column."""
    assert algorithm.advantage is not None, f"{algorithm.name} has no advantage estimator"
    function = advantage_functions(algorithm.advantage)[0]
    columns = {"rewards": rewards_B, "groups": groups_B}
    return function(*_bound(function, columns), **arguments(function, algorithm.params))


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
        result = function(*_bound(function, columns), **arguments(function, algorithm.params))
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
    found = {name: _columns_of(_derived(name), algorithm) | {"mask"} for name in sorted(names)}
    if algorithm.params.get("correction"):
        functions = [function for function, _ in _corrections(algorithm)]
        found["correction"] = frozenset({"mask"}).union(*(_columns_of(function, algorithm) for function in functions))
    return found


def derive(algorithm: Algorithm, column: str, rows: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
    """Token column `column` of a whole batch, [N]; see `derived_columns`. `rows` has `mask` and `lengths` too."""
    if column == "correction":
        found = combine([function(*_bound(function, rows), **params) for function, params in _corrections(algorithm)])
        return found.column, Metrics(found.metrics or {})
    function = _derived(column)
    return function(*_bound(function, rows), **arguments(function, algorithm.params)), Metrics()


def step_needs(algorithm: Algorithm) -> frozenset[str]:
    """The columns that `step_columns` reads."""
    kept = algorithm.params.get("denominator") == "kept"
    found = {"mask": True, "correction": kept, "rewards": "positive_scale" in step_gives(algorithm)}
    return frozenset(name for name, needed in found.items() if needed)


def step_gives(algorithm: Algorithm) -> frozenset[str]:
    """The columns that `step_columns` gives; the update reads them beside `algorithm.needs`."""
    positive = "positive_nll" in algorithm.loss.split("+")
    return frozenset({"loss_weights", "positive_scale"} if positive else {"loss_weights"})


def step_columns(algorithm: Algorithm, rows: Mapping[str, Tensor], *, ranks: int = 1) -> dict[str, Tensor]:
    """Column `loss_weights` of the rows of one optimiser step, [N] float32, and `positive_scale` where a term needs it.

    See `aggregation.loss_weights`. With denominator "kept", dropped tokens are not counted. `rows` has `lengths` too.
    """
    chosen: dict[str, Any] = {name: algorithm.params[name] for name in _AGGREGATION}
    mask_N = rows["mask"]
    if "correction" in step_needs(algorithm):
        mask_N = mask_N & (rows["correction"] != 0)
    weights_N = loss_weights(mask_N, rows["lengths"], ranks=ranks, **chosen)
    if "positive_scale" not in step_gives(algorithm):
        return {"loss_weights": weights_N}
    positive_N = mask_N & (on_tokens(rows["rewards"], rows["lengths"]) > 0)
    return {"loss_weights": weights_N, "positive_scale": mean_over(positive_N, weights_N, ranks=ranks)}


def _derived(column: str) -> Callable[..., Tensor]:
    return _function(column, DERIVED, "derived column")


def _bound(function: Callable[..., Any], columns: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Its positional arguments: `values_N` is columns["values"]; one with a default may be missing."""
    parameters = inspect.signature(function).parameters
    optional = {name for name in inputs_of(function) if parameters[name].default is not inspect.Parameter.empty}
    return [columns.get(_column(name)) if name in optional else columns[_column(name)] for name in inputs_of(function)]


def _column(parameter: str) -> str:
    """`values_N` and `values` both name column `values`."""
    return re.sub(r"_[A-Z0-9]+$", "", parameter)


def _columns_of(function: Callable[..., Any], algorithm: Algorithm) -> frozenset[str]:
    """Columns that its positional parameters name; optional ones are those of a KL penalty in the reward."""
    parameters = inspect.signature(function).parameters
    penalty = bool(algorithm.params.get("reward_kl_coef"))
    return (
        frozenset(_column(name) for name in inputs_of(function) if parameters[name].default is inspect.Parameter.empty or penalty)
        - _NOT_COLUMNS
    )


def _corrections(algorithm: Algorithm) -> list[tuple[Callable[..., Correction], dict[str, Any]]]:
    chosen = _as_mapping(algorithm.params["correction"])
    return [(correction_function(name), dict(cast("Mapping[str, Any]", params))) for name, params in chosen.items()]


def _as_mapping(correction: Json) -> dict[str, Json]:
    """`icepop` is short for `{icepop: {}}`."""
    if isinstance(correction, str):
        return {correction: {}}
    return {} if correction is None else dict(cast("Mapping[str, Json]", correction))


# -------------------------------------------------------------------------------------------- configuring a row


def configure(name: str, params: Mapping[str, Json] | None = None) -> Algorithm:
    """The row of this name or path, with a recipe's parameters in place of its defaults.

    `keep` is a parameter of every row that has an advantage: the filter of dynamic sampling, or None. So is `correction`:
    None, the name of a correction, or a mapping of names to their parameters.

    Raises:
        ConfigError: all unknown names and wrong types at once; or values that a function of the row refuses, found by
            running each function on a single token; or functions that make no sense together.
        RegistryError: no such row or function.
    """
    found = ALGORITHMS.get(name) or resolve(name, dict.fromkeys(ALGORITHMS, ""), kind="algorithm")
    if not isinstance(found, Algorithm):
        raise ConfigError(f"algorithm {name!r} is {found!r}; it must be a tandem.types.Algorithm")
    row = _complete(found)
    given = dict(params or {})
    keep = given.pop("keep", row.keep)
    types = parameter_types(row)
    problems = _misfits(f"algorithm {row.name}", given, types)
    if keep is not None and (row.advantage is None or not isinstance(keep, str)):
        problems.append(f"algorithm parameter keep={keep!r}: {row.name} takes the name of a group filter only if it has groups")
    merged = {**row.params, **given}
    if not problems:
        problems += _correction_misfits(row, merged)
    problems += [f"algorithm {row.name} needs a value for {missing}" for missing in types.keys() - merged.keys()]
    if problems:
        raise ConfigError("\n".join(problems))

    columns = {column for parameter, column in COLUMN_OF.items() if merged.get(parameter)}
    algorithm = replace(row, params=merged, needs=row.needs | columns, keep=cast("str | None", keep))
    try:
        _rehearse(algorithm)
    except ValueError as error:
        raise ConfigError(f"algorithm {algorithm.name}: {error}") from error
    return algorithm


def _misfits(owner: str, given: Mapping[str, Json], types: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    for parameter, value in given.items():
        if parameter not in types:
            near = difflib.get_close_matches(parameter, types, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(types)) or 'none'}"
            problems.append(f"{owner} has no parameter {parameter!r}; {hint}")
            continue
        try:
            TypeAdapter(types[parameter]).validate_python(value, strict=True)
        except ValidationError as error:
            problems.append(f"algorithm parameter {parameter}={value!r}: {error.errors()[0]['msg']}")
    return problems


def _correction_misfits(row: Algorithm, params: Mapping[str, Json]) -> list[str]:
    problems: list[str] = []
    for name, given in _as_mapping(params.get("correction")).items():
        function = correction_function(name)
        types = types_of(function)
        if not isinstance(given, Mapping):
            problems.append(f"algorithm parameter correction.{name}={given!r}: a mapping of its parameters is needed")
            continue
        if "low" in given and "low" not in types and "high" in types:
            problems.append(f"correction {name} is a bound on a divergence, which is never too small: it has high and no low")
            given = {parameter: value for parameter, value in given.items() if parameter != "low"}
        problems += _misfits(f"correction {name}", given, types)
    return problems


def functions_of(row: Algorithm) -> list[Callable[..., Any]]:
    """All whose parameters are the row's."""
    found: list[Callable[..., Any]] = [loss_function(row.loss)]
    columns = row.needs
    if row.advantage is not None:
        found += advantage_functions(row.advantage)
        columns |= credit_needs(row)
    return found + [_derived(name) for name in sorted(columns & DERIVED.keys())]


def parameter_types(row: Algorithm) -> dict[str, Any]:
    """The type of each parameter; a name that two functions share means the same to both."""
    types = {name: types_of(loss_weights)[name] for name in _AGGREGATION}
    if row.advantage is not None:
        types |= _POLICY_TYPES
    for function in functions_of(row):
        types |= types_of(function)
    return types


def _complete(row: Algorithm) -> Algorithm:
    """The row with its functions' defaults for the parameters that it does not set."""
    declared = {name: parameters_of(loss_weights)[name] for name in _AGGREGATION}
    for function in functions_of(row):
        declared |= parameters_of(function)
    defaults = {name: each.default for name, each in declared.items() if each.default is not inspect.Parameter.empty}
    policy = _POLICY_DEFAULTS if row.advantage is not None else {}
    return replace(row, params={**defaults, **policy, **row.params})


def _rehearse(algorithm: Algorithm) -> None:
    """Runs every function of the row on one token of one episode, and asks whether they fit together."""
    zero, counted, one = torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.int64)
    rows = dict.fromkeys(algorithm.needs, zero) | {"mask": counted, "lengths": one, "rewards": zero, "correction": zero + 1}
    rows |= step_columns(algorithm, rows)
    loss = loss_ref(algorithm)
    columns = {name: rows[name] for name in (algorithm.needs | step_gives(algorithm)) - EVERY_UPDATE}
    loss_function(loss.name)(LossInputs(zero, counted, one, columns), **loss.params)
    if algorithm.advantage is not None:
        _rehearse_credit(algorithm, rows)
    if algorithm.keep is not None:
        keep_function(algorithm.keep)(zero)


def _rehearse_credit(algorithm: Algorithm, rows: dict[str, Tensor]) -> None:
    needed = credit_needs(algorithm).union(*derived_columns(algorithm).values())
    rows = (
        dict.fromkeys(needed, torch.zeros(1)) | rows | {"groups": torch.zeros(1, dtype=torch.int64), "advantages": torch.zeros(1)}
    )
    width = len(cast("list[float]", algorithm.params.get("reward_weights") or [1.0]))
    episodes = {**rows, "token_counts": torch.ones(1), "reward_components": torch.zeros(1, width)}
    credit(algorithm, rows, episodes, torch.zeros(1, dtype=torch.int64))
    for column in derived_columns(algorithm):
        derive(algorithm, column, rows)
    if not algorithm.params["correction"]:
        if algorithm.params["denominator"] == "kept":
            raise ValueError("denominator=kept counts what a correction keeps, and there is no correction: set one or leave it out")
        return
    if algorithm.params["bypass"]:
        raise ValueError("bypass=true makes old_logprobs the sampler's own, so a correction has nothing to correct: leave one out")
    gates = {function: function(*_bound(function, rows), **params).gates for function, params in _corrections(algorithm)}
    whole = [part for part in parts_of(loss_function(algorithm.loss)) if scope_of(part) == "row"]
    for function, gate in gates.items():
        if gate == "token" and whole:
            raise ValueError(
                f"correction {function.__name__} drops single tokens, and {whole[0].__name__} treats a row as one action with one "
                f"ratio: use a correction of rows, such as sequence_mask or sequence_trust_region"
            )


ALGORITHMS: dict[str, Algorithm] = {row.name: _complete(row) for row in ROWS}
