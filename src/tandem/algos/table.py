"""The algorithm table: one row per algorithm, data and no code.

A row names an advantage estimator, a policy loss and an aggregation, and says which columns an update reads; the
pipeline is derived from those. Its parameters are the keyword-only parameters of its functions, with the row's own
defaults where they differ. To add an algorithm: write its functions in their modules, name them here, add a row. A
recipe may also name a function or a whole row of its own as "package.module:attr".
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from tandem.algos.aggregation import loss_weights
from tandem.algos.terms import LossFunction, LossInputs
from tandem.errors import ConfigError
from tandem.registry import resolve
from tandem.types import Algorithm, Json, LossRef

AdvantageFunction = Callable[..., Tensor]
KeepFunction = Callable[[Tensor], bool]

LOSSES = {
    "ppo_clip": "tandem.algos.policy_losses:ppo_clip",
    "nll": "tandem.algos.supervised:negative_log_likelihood",
}
ADVANTAGES = {"group_baseline": "tandem.algos.advantages:group_baseline"}
FILTERS = {"varied_rewards": "tandem.algos.filters:varied_rewards"}

COLUMN_OF: dict[str, str] = {"kl_coef": "ref_logprobs"}
"""Parameters that make the update read one more column when they are not 0."""

_EVERY_UPDATE = frozenset({"tokens", "mask", "temperature"})
_AGGREGATION = ("aggregation", "length_constant")


def loss_function(name: str) -> LossFunction:
    """The loss `(LossInputs, *, parameters) -> TokenLoss` of this name or path."""
    return cast("LossFunction", _function(name, LOSSES, "loss"))


def advantage_function(name: str) -> AdvantageFunction:
    """The estimator `(rewards [B], groups [B], *, parameters) -> advantages [B]` of this name or path."""
    return cast("AdvantageFunction", _function(name, ADVANTAGES, "advantage estimator"))


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
    return LossRef(algorithm.loss, _arguments(loss_function(algorithm.loss), algorithm.params))


def advantages(algorithm: Algorithm, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B] float32, one an episode; the algorithm must have an estimator."""
    assert algorithm.advantage is not None, f"{algorithm.name} has no advantage estimator"
    function = advantage_function(algorithm.advantage)
    return function(rewards_B, groups_B, **_arguments(function, algorithm.params))


def step_weights(algorithm: Algorithm, mask_N: Tensor, lengths_B: Tensor, *, ranks: int = 1) -> Tensor:
    """Column `loss_weights` of the rows of one optimiser step, [N] float32; see `aggregation.loss_weights`."""
    chosen: dict[str, Any] = {name: algorithm.params[name] for name in _AGGREGATION}
    return loss_weights(mask_N, lengths_B, ranks=ranks, **chosen)


# -------------------------------------------------------------------------------------------- configuring a row


def configure(name: str, params: Mapping[str, Json] | None = None) -> Algorithm:
    """The row of this name or path, with a recipe's parameters in place of its defaults.

    `keep` is a parameter of every row that has an advantage: the filter of dynamic sampling, or None.

    Raises:
        ConfigError: all unknown names and wrong types at once; or values that a function of the row refuses, found by
            running each function on a single token.
        RegistryError: no such row or function.
    """
    found = ALGORITHMS.get(name) or resolve(name, dict.fromkeys(ALGORITHMS, ""), kind="algorithm")
    if not isinstance(found, Algorithm):
        raise ConfigError(f"algorithm {name!r} is {found!r}; it must be a tandem.types.Algorithm")
    row = _complete(found)
    given = dict(params or {})
    keep = given.pop("keep", row.keep)
    types = _types(row)
    problems: list[str] = []
    for parameter, value in given.items():
        if parameter not in types:
            near = difflib.get_close_matches(parameter, types, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(types))}"
            problems.append(f"algorithm {row.name} has no parameter {parameter!r}; {hint}")
            continue
        try:
            TypeAdapter(types[parameter]).validate_python(value, strict=True)
        except ValidationError as error:
            problems.append(f"algorithm parameter {parameter}={value!r}: {error.errors()[0]['msg']}")
    if keep is not None and (row.advantage is None or not isinstance(keep, str)):
        problems.append(f"algorithm parameter keep={keep!r}: {row.name} takes the name of a group filter only if it has groups")
    merged = {**row.params, **given}
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


def _functions(row: Algorithm) -> list[Callable[..., Any]]:
    return [loss_function(row.loss), *([] if row.advantage is None else [advantage_function(row.advantage)])]


def _keyword_only(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: parameter for name, parameter in found.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def _arguments(function: Callable[..., Any], params: Mapping[str, Json]) -> dict[str, Any]:
    return {name: params[name] for name in _keyword_only(function)}


def _types(row: Algorithm) -> dict[str, Any]:
    """The type of each parameter; a name that two functions share means the same to both."""
    hints = get_type_hints(loss_weights)
    types = {name: hints[name] for name in _AGGREGATION}
    for function in _functions(row):
        hints = get_type_hints(function)
        types |= {name: hints.get(name, Any) for name in _keyword_only(function)}
    return types


def _complete(row: Algorithm) -> Algorithm:
    """The row with its functions' defaults for the parameters that it does not set."""
    declared = [_keyword_only(function) for function in _functions(row)]
    aggregation = _keyword_only(loss_weights)
    declared.append({name: aggregation[name] for name in _AGGREGATION})
    defaults = {
        name: parameter.default
        for parameters in declared
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return replace(row, params={**defaults, **row.params})


def _rehearse(algorithm: Algorithm) -> None:
    """Runs every function of the row on one token of one episode."""
    zero, counted, length = torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.int64)
    step_weights(algorithm, counted, length)
    columns = dict.fromkeys(algorithm.needs - _EVERY_UPDATE, zero)
    loss = loss_ref(algorithm)
    loss_function(loss.name)(LossInputs(zero, counted, length, columns), **loss.params)
    if algorithm.advantage is not None:
        advantages(algorithm, zero, length)
    if algorithm.keep is not None:
        keep_function(algorithm.keep)(zero)


# ---------------------------------------------------------------------------------------------------- the rows

_ROWS = (
    Algorithm(
        name="grpo",  # with no KL term unless kl_coef is set; the paper uses 0.04
        source="DeepSeekMath, arXiv 2402.03300",
        advantage="group_baseline",
        min_episodes=2,
        loss="ppo_clip",
        needs=_EVERY_UPDATE | {"old_logprobs", "advantages"},
        params={"aggregation": "seq-mean-token-mean"},
    ),
    Algorithm(
        name="dr_grpo",  # length_constant has no default: it is the recipe's longest response
        source="Understanding R1-Zero-like training, arXiv 2503.20783",
        advantage="group_baseline",
        min_episodes=2,
        loss="ppo_clip",
        needs=_EVERY_UPDATE | {"old_logprobs", "advantages"},
        params={"scale": "none", "aggregation": "seq-mean-token-sum-norm"},
    ),
    Algorithm(
        name="dapo",  # its penalty for overlong responses belongs to the reward
        source="DAPO, arXiv 2503.14476",
        advantage="group_baseline",
        min_episodes=2,
        loss="ppo_clip",
        needs=_EVERY_UPDATE | {"old_logprobs", "advantages"},
        params={"clip_high": 0.28, "aggregation": "token-mean"},
        keep="varied_rewards",
    ),
    Algorithm(
        name="sft",
        source="maximum likelihood",
        advantage=None,
        loss="nll",
        needs=_EVERY_UPDATE,
        params={"aggregation": "token-mean"},
    ),
)
ALGORITHMS: dict[str, Algorithm] = {row.name: _complete(row) for row in _ROWS}
