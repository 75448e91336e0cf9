"""The table as text for a terminal: what `tandem algos` prints. Formulas are the functions' own docstrings.

`listing()` has a line for each row; `description("gspo")` is a page.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin

from tandem.algos.columns import credit_needs, derived_columns
from tandem.algos.composition import inputs_of, parameters_of, parts_of, types_of
from tandem.algos.functions import CORRECTIONS, advantage_functions, correction_function, loss_function
from tandem.algos.notes import NOTES
from tandem.algos.rows import EVERY_UPDATE
from tandem.algos.table import ALGORITHMS, POLICY_DEFAULTS, functions_of, parameter_types
from tandem.registry import resolve
from tandem.types import Algorithm, Json

WIDTH = 100
_GIVEN = frozenset(
    {"rewards", "old_logprobs", "rollout_logprobs", "advantages", "correction", "resample_counts", "mask", "turns", "uniforms"}
)
"""Columns that every run has, or that the pipeline makes without another model."""


def listing() -> list[str]:
    """A line for each algorithm, then what it comes from, what it needs beyond rewards and logprobs, and its defaults."""
    lines: list[str] = []
    for name, row in ALGORITHMS.items():
        lines.append(f"{name}: {NOTES[name].line}")
        lines.append(f"    source    {row.source}")
        lines.append(
            f"    needs     {', '.join(_special_needs(row)) or 'rewards' * (row.advantage is not None) or 'demonstrations'}"
        )
        lines += _wrapped(f"    defaults  {' '.join(f'{key}={_shown(value)}' for key, value in own_defaults(row).items())}", 14)
    return [*lines, "", "tandem algos NAME shows formula, parameters and when to choose it.", *_corrections()]


def description(name: str) -> list[str]:
    """Formulas, parameters with defaults, what frameworks set, when to choose it. Raises RegistryError for an unknown name."""
    if name in CORRECTIONS:
        return _correction(name)
    if name not in ALGORITHMS:
        resolve(name, dict.fromkeys([*ALGORITHMS, *CORRECTIONS], ""), kind="algorithm")
    row, note = ALGORITHMS[name], NOTES[name]
    lines = [f"{name}: {note.line}", f"Source: {row.source}", *_wrapped(f"Choose it: {note.choose}", 11)]
    advantages = () if row.advantage is None else advantage_functions(row.advantage)
    if advantages:
        lines += ["", f"Advantage: {row.advantage}", *(line for each in advantages for line in _formula(each))]
    lines += ["", f"Loss: {row.loss}", *(line for each in parts_of(loss_function(row.loss)) for line in _formula(each))]
    others = [each for each in functions_of(row) if each not in advantages and each is not loss_function(row.loss)]
    made = [each for each in others if each not in parts_of(loss_function(row.loss)) and hasattr(each, "__name__")]
    for each in made:
        lines += ["", f"Made from the whole batch: {each.__name__}", *_formula(each)]
    lines += ["", "Parameters, with the defaults of this row:"]
    types = parameter_types(row)
    for key in sorted(types):
        default = _shown(row.params[key]) if key in row.params else "to be set"
        lines.append(f"    {key:<24} {default:<20} {_type(types[key])}")
    if row.advantage is not None:
        lines.append(f"    {'keep':<24} {_shown(row.keep):<20} a filter of groups, or null")
    if note.frameworks:
        lines += ["", "What makes the variant of:"]
        lines += [line for framework, how in note.frameworks.items() for line in _wrapped(f"    {framework:<12} {how}", 17)]
    return lines


def own_defaults(row: Algorithm) -> dict[str, Json]:
    """The parameters that the row sets otherwise than its functions do."""
    functions = {name: each.default for function in functions_of(row) for name, each in parameters_of(function).items()}
    plain = {**functions, "length_constant": None, **POLICY_DEFAULTS}
    own = {name: value for name, value in row.params.items() if name not in plain or plain[name] != value}
    return own if row.keep is None else {**own, "keep": row.keep}


def _special_needs(row: Algorithm) -> list[str]:
    columns = row.needs
    if row.advantage is not None:
        columns |= credit_needs(row)
    return sorted(columns - EVERY_UPDATE - _GIVEN - derived_columns(row).keys())


def _corrections() -> list[str]:
    lines = ["", "algorithm.correction, for any row with an advantage:"]
    for name in CORRECTIONS:
        first = (inspect.getdoc(correction_function(name)) or "").splitlines()[0]
        lines += _wrapped(f"    {name}: {first}", 8)
    return lines


def _correction(name: str) -> list[str]:
    function = correction_function(name)
    lines = [f"algorithm.correction={name}", *_formula(function), "", "Parameters:"]
    types = types_of(function)
    for key, parameter in parameters_of(function).items():
        lines.append(f"    {key:<24} {_shown(parameter.default):<20} {_type(types[key])}")
    return lines


def _formula(function: Callable[..., Any]) -> list[str]:
    document = inspect.getdoc(function) or ""
    reads = ", ".join(inputs_of(function))
    return [
        *(f"    {line}".rstrip() for line in document.splitlines()),
        f"    [{function.__module__}:{function.__name__}({reads})]",
    ]


def _wrapped(line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _shown(value: object) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool | None) else str(value)


def _type(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_type, get_args(annotation)))
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for long, short in (("typing.Literal", ""), ("typing.Any", "..."), ("NoneType", "null"), ("None", "null"), ("'", "")):
        text = text.replace(long, short)
    return text
