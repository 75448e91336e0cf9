"""The algorithm table: one row per algorithm, data and no code. rows.py holds them, notes.py says when to choose which.

A row names an advantage estimator, a policy loss and parameters: the keyword-only parameters of its functions, with the
row's own defaults where they differ. Which columns an update reads is found by running its loss on two rows, so that no row
can say it wrong, and the pipeline is derived from them. To add an algorithm: write its functions in their modules, name them
in functions.py, add a row. A recipe may also name a whole row of its own as "package.module:attr".
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, cast, get_args, get_origin

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from tandem.algos.aggregation import loss_weights
from tandem.algos.columns import (
    AGGREGATION,
    as_mapping,
    bound,
    corrections_of,
    credit,
    credit_needs,
    derive,
    derived_columns,
    loss_ref,
    step_columns,
    step_gives,
)
from tandem.algos.composition import parameters_of, parts_of, types_of
from tandem.algos.corrections import Gates
from tandem.algos.functions import DERIVED, advantage_functions, correction_function, derived_function, keep_function, loss_function
from tandem.algos.ratios import CORRECTION
from tandem.algos.rows import EVERY_UPDATE, ROWS
from tandem.algos.shaping import Resampling, resampling_weights
from tandem.algos.terms import LossInputs, scope_of
from tandem.errors import ColumnError, ConfigError
from tandem.registry import resolve
from tandem.types import Algorithm, Json

_POLICY_TYPES: dict[str, Any] = {
    "correction": str | dict[str, Any] | None,
    "denominator": Literal["all", "kept"],
    "bypass": bool,
    "resampling": Resampling | None,
    "resampling_pow": float,
}
"""What every row with an advantage takes. correction: see `configure`. denominator: whether tokens that a correction drops
are counted. bypass: the sampler's logprobs stand for old_logprobs, and no pass of the trainer computes them. resampling: how
episodes are drawn anew, with replacement, before the update (`shaping.resampling_weights`); resampling_pow is its exponent."""
_LARGEST = torch.finfo(torch.float32).max
POLICY_DEFAULTS: dict[str, Json] = {
    "correction": None,
    "denominator": "all",
    "bypass": False,
    "resampling": None,
    "resampling_pow": 2.0,
}


def configure(name: str, params: Mapping[str, Json] | None = None) -> Algorithm:
    """The row of this name or path, with a recipe's parameters in place of its defaults.

    `keep` is a parameter of every row that has an advantage: the filter of dynamic sampling, or None. So is `correction`:
    None, the name of a correction, or a mapping of names to their parameters.

    Raises:
        ConfigError: all unknown names, wrong types and numbers that are not finite at once; or values that a function of
            the row refuses, found by running each function on two rows of one token; or functions that make no sense together.
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

    algorithm = replace(row, params=merged, keep=cast("str | None", keep))
    try:
        algorithm = replace(algorithm, needs=found.needs | _reads(algorithm))
        _rehearse(algorithm)
    except ValueError as error:
        raise ConfigError(f"algorithm {algorithm.name}: {error}") from error
    return algorithm


def _misfits(owner: str, given: Mapping[str, Json], types: Mapping[str, Any], inside: str = "") -> list[str]:
    """inside: what stands before a parameter's name where it is one of a part, as in "correction.icepop."."""
    problems: list[str] = []
    for parameter, value in given.items():
        if parameter not in types:
            near = difflib.get_close_matches(parameter, types, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(types)) or 'none'}"
            problems.append(f"{owner} has no parameter {parameter!r}; {hint}")
            continue
        if problem := _misfit(value, types[parameter]):
            problems.append(f"algorithm parameter {inside}{parameter}={value!r}: {problem}")
    return problems


def _misfit(value: Json, annotation: Any) -> str | None:
    """What is wrong with a value for a parameter of this type."""
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError as error:
        return error.errors()[0]["msg"]
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    if choices and not any(value == each and type(value) is type(each) for each in choices):  # True equals 1
        return f"Input should be {' or '.join(map(repr, choices))}"
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(each, float) and not abs(each) <= _LARGEST for each in numbers):
        return "it must be finite, in float32"
    return None


def _correction_misfits(row: Algorithm, params: Mapping[str, Json]) -> list[str]:
    problems: list[str] = []
    for name, given in as_mapping(params.get("correction")).items():
        function = correction_function(name)
        types = types_of(function)
        if not isinstance(given, Mapping):
            problems.append(f"algorithm parameter correction.{name}={given!r}: a mapping of its parameters is needed")
            continue
        if "low" in given and "low" not in types and "high" in types:
            problems.append(f"correction {name} is a bound on a divergence, which is never too small: it has high and no low")
            given = {parameter: value for parameter, value in given.items() if parameter != "low"}
        problems += _misfits(f"correction {name}", given, types, inside=f"correction.{name}.")
    return problems


def functions_of(row: Algorithm) -> list[Callable[..., Any]]:
    """All whose parameters are the row's."""
    found: list[Callable[..., Any]] = [loss_function(row.loss)]
    columns = row.needs
    if row.advantage is not None:
        found += advantage_functions(row.advantage)
        columns |= credit_needs(row)
    return found + [derived_function(name) for name in sorted(columns & DERIVED.keys())]


def parameter_types(row: Algorithm) -> dict[str, Any]:
    """The type of each parameter; a name that two functions share means the same to both."""
    types = {name: types_of(loss_weights)[name] for name in AGGREGATION}
    if row.advantage is not None:
        types |= _POLICY_TYPES
    for function in functions_of(row):
        types |= types_of(function)
    return types


def _complete(row: Algorithm) -> Algorithm:
    """The row with its functions' defaults for the parameters that it does not set, and with the columns that it needs then."""
    averaged = {name: value for name, value in _defaults(loss_weights).items() if name in AGGREGATION}
    policy = POLICY_DEFAULTS if row.advantage is not None else {}
    row = replace(row, params={**averaged, **_defaults(*functions_of(row)), **policy, **row.params})
    if parameters_of(loss_function(row.loss)).keys() <= row.params.keys():  # else a recipe has to set one before it can run
        row = replace(row, needs=row.needs | _reads(row))
    return replace(row, params={**_defaults(*functions_of(row)), **row.params})  # of what derives those columns, too


def _defaults(*functions: Callable[..., Any]) -> dict[str, Json]:
    declared = {name: each for function in functions for name, each in parameters_of(function).items()}
    return {name: each.default for name, each in declared.items() if each.default is not inspect.Parameter.empty}


class _AnyColumn(dict[str, Tensor]):
    """A pair of rows of one token with every column that is asked for; a loss weighs by `correction` only where there is one."""

    def __contains__(self, name: object) -> bool:
        return name != CORRECTION

    def __missing__(self, name: str) -> Tensor:
        special = {"chosen": torch.tensor([True, False]), "teacher_topk_logprobs": torch.zeros(2, 1)}
        return self.setdefault(name, special.get(name, torch.zeros(2)))


def learns_values(algorithm: Algorithm) -> bool:
    """Whether what it trains is a model of values: its loss cannot do without them."""
    try:
        _asked_for(algorithm, None)
    except ColumnError:
        return True
    return False


def _asked_for(algorithm: Algorithm, values: Tensor | None) -> _AnyColumn:
    """The columns that its loss asks for with these parameters, when it is given two rows, and `values` [2] of the model."""
    columns, loss, ones = _AnyColumn(), loss_ref(algorithm), torch.ones(2, dtype=torch.int64)
    group, at_topk = torch.zeros_like(ones), torch.zeros(2, 1)
    inputs = LossInputs(torch.zeros(2), ones.bool(), ones, columns, groups=group, at_topk=at_topk, values=values)
    loss_function(loss.name)(inputs, **loss.params)
    return columns


def _reads(algorithm: Algorithm) -> frozenset[str]:
    """The columns that an update reads."""
    columns = _asked_for(algorithm, torch.zeros(2))
    chosen = {CORRECTION: "correction", "resample_counts": "resampling"}
    more = {column for column, parameter in chosen.items() if algorithm.params.get(parameter)}
    return EVERY_UPDATE | (columns.keys() - step_gives(algorithm)) | more


def _rehearse(algorithm: Algorithm) -> None:
    """Runs every function of the row but its loss, and asks whether they all fit together."""
    step_columns(algorithm, _rehearsed_rows(algorithm))
    chosen = algorithm.params["aggregation"]
    if scope_of(loss_function(algorithm.loss)) == "group" and chosen != "seq-mean-token-mean":
        raise ValueError(f"aggregation={chosen} is no mean over pairs, and seq-mean-token-mean is: leave it out")
    if algorithm.advantage is not None:
        _rehearse_credit(algorithm)
    if algorithm.keep is not None:
        keep_function(algorithm.keep)(torch.zeros(1))


def _rehearsed_rows(algorithm: Algorithm) -> dict[str, Tensor]:
    zeros, ones = torch.zeros(2), torch.ones(2)
    rows = dict.fromkeys(algorithm.needs, zeros) | {"mask": ones.bool(), "lengths": ones.long(), "groups": zeros.long()}
    return rows | {"rewards": zeros, "correction": ones, "resample_counts": ones}


def _rehearse_credit(algorithm: Algorithm) -> None:
    needed = credit_needs(algorithm).union(*derived_columns(algorithm).values())
    rows = dict.fromkeys((*needed, "advantages"), torch.zeros(2)) | _rehearsed_rows(algorithm)
    width = len(cast("list[float]", algorithm.params.get("reward_weights") or [1.0]))
    episodes = {**rows, "token_counts": torch.ones(2), "reward_components": torch.zeros(2, width)}
    credit(algorithm, rows, episodes, torch.arange(2))
    gates = _gates(algorithm, rows)
    for column in derived_columns(algorithm):
        derive(algorithm, column, rows)
    resampling_weights(torch.zeros(2), weight_pow=cast("float", algorithm.params["resampling_pow"]))
    if not algorithm.params["correction"]:
        if algorithm.params["denominator"] == "kept":
            raise ValueError("denominator=kept counts what a correction keeps, and there is no correction: set one or leave it out")
        return
    if algorithm.params["bypass"]:
        raise ValueError("bypass=true makes old_logprobs the sampler's own, so a correction has nothing to correct: leave one out")
    whole = [part for part in parts_of(loss_function(algorithm.loss)) if scope_of(part) == "row"]
    for name, gate in gates.items():
        if gate == "token" and whole:
            raise ValueError(
                f"correction {name} drops single tokens, and {whole[0].__name__} treats a row as one action with one "
                f"ratio: use a correction of rows, such as sequence_mask or sequence_trust_region"
            )


def _gates(algorithm: Algorithm, rows: Mapping[str, Tensor]) -> dict[str, Gates]:
    """What each of its corrections keeps or drops as one, by name. A ValueError says which correction refuses a parameter."""
    found: dict[str, Gates] = {}
    for name, (function, params) in zip(as_mapping(algorithm.params["correction"]), corrections_of(algorithm), strict=True):
        try:
            found[name] = function(*bound(function, rows), **params).gates
        except ValueError as error:
            refused = re.split(r"\W", str(error), maxsplit=1)[0]
            raise ValueError(f"correction.{name}{'.' if refused in types_of(function) else ': '}{error}") from error
    return found


ALGORITHMS: dict[str, Algorithm] = {row.name: _complete(row) for row in ROWS}
