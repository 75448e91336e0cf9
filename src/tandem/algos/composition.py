"""Functions of one row of the table put together: sums of loss terms, and who takes which parameter.

A parameter is keyword-only. Functions that share a name share its meaning, so that a recipe sets it once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from torch import Tensor

from tandem.algos.terms import LossFunction, LossInputs, TermScope, TokenLoss, scope_of
from tandem.errors import ConfigError
from tandem.types import Metrics


def parts_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The terms of a sum, or the function itself."""
    return function.parts if isinstance(function, LossSum) else (function,)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Keyword-only parameters by name, those of every term."""
    found = [(part, inspect.signature(part).parameters) for part in parts_of(function)]
    return {
        name: parameter
        for _, parameters in found
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def types_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of each keyword-only parameter."""
    hints = {name: hint for part in parts_of(function) for name, hint in get_type_hints(part).items()}
    return {name: hints.get(name, Any) for name in parameters_of(function)}


def inputs_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of its positional parameters, in order."""
    found = inspect.signature(function).parameters.values()
    return tuple(each.name for each in found if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def arguments(function: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `params` that the function takes."""
    return {name: params[name] for name in parameters_of(function) if name in params}


class LossSum:
    """A loss whose terms are those of its parts; each part takes its own parameters."""

    def __init__(self, parts: tuple[LossFunction, ...]) -> None:
        self.parts = parts
        self.term_scope = max(map(scope_of, parts), key=get_args(TermScope).index)

    def __call__(self, inputs: LossInputs, **params: Any) -> TokenLoss:
        if unknown := params.keys() - parameters_of(self).keys():
            raise TypeError(f"no part of this loss takes {', '.join(sorted(unknown))}")
        terms: dict[str, Tensor] = {}
        metrics = Metrics()
        for part in self.parts:
            result = part(inputs, **arguments(part, params))
            if twice := terms.keys() & result.terms.keys():
                raise ConfigError(f"two parts of one loss give the term {', '.join(sorted(twice))}")
            terms |= result.terms
            metrics += result.metrics
        return TokenLoss(terms, metrics)


def loss_sum(*parts: LossFunction) -> LossFunction:
    """The sum of these losses; one alone is itself."""
    return parts[0] if len(parts) == 1 else LossSum(parts)
