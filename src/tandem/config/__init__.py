"""From a recipe file and dotted overrides to one frozen dataclass, with the origin of every value.

This package knows no component: the schema is whatever dataclass it is given, and each component owns its own section
beside its class. A schema is made of nested dataclasses, `tuple[X, ...]`, `dict[str, X]`, `X | None`, `Literal`, `Path`
and the scalars; a section checks its values in `__post_init__` and raises ValueError. Two class variables bend the rules:

    SHORTHAND: ClassVar[str] = "name"    a bare scalar fills that field: `algorithm: grpo` is `algorithm: {name: grpo}`
    EXTRA: ClassVar[str] = "params"      keys that are no field go into that dict: `algorithm.clip_low=0.1`

Scalars are read by the rules of YAML 1.2 and without coercion: `1e-3` is a number, `no` is text, "3" is not an integer. An
override is read the same way, and as the text it is where text is expected. Mappings merge key by key, the file first and
then the overrides in their order; anything else replaces. There are no includes and no interpolation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from tandem.config.build import Builder
from tandem.config.document import Node, Origin, read_file, read_override, to_line, to_yaml
from tandem.config.schema import flatten, leaves, plain
from tandem.errors import ConfigError

__all__ = ["DEFAULT", "Origin", "Resolved", "dump", "explain", "flatten", "leaves", "load", "read"]

T = TypeVar("T")

DEFAULT: Origin = "default"


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """A value and, for each of its dotted leaves, where it came from: "FILE:LINE", "command line: KEY=VALUE" or "default"."""

    value: T
    origins: Mapping[str, Origin]


def load(path: Path, overrides: Sequence[str], schema: type[T]) -> Resolved[T]:
    """Reads the recipe at `path`, applies `overrides` ("train.lr=1e-3") and builds a `schema`.

    Raises ConfigError with every problem of the file and of the overrides, one a line, each with its position.
    """
    problems: list[str] = []
    recipe = read_file(path, problems)
    written = [recipe, *(read_override(text, problems) for text in overrides)]
    layers: list[Node] = [layer for layer in written if layer is not None]
    builder = Builder(problems, source=str(path), complete=recipe is not None, known=leaves(schema))
    value = builder.build(schema, layers, "")
    if problems:
        lines = list(dict.fromkeys(problems))
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        where = f"{path} and its overrides" if overrides else f"{path}"
        raise ConfigError("\n".join([f"{count} in {where}:", *(f"  {line}" for line in lines)]))
    return Resolved(cast(T, value), {leaf: builder.origins.get(leaf, DEFAULT) for leaf, _ in flatten(value)})


def read(path: Path) -> dict[str, Any]:
    """What a file that `dump` wrote says, as it stands: no schema, so that files of other versions can be read too.

    Raises ConfigError where it is no mapping.
    """
    problems: list[str] = []
    node = read_file(path, problems)
    if node is None or node.entries is None or problems:
        raise ConfigError("\n".join(problems) or f"{path} is no mapping")
    return node.plain()


def explain(resolved: Resolved[Any]) -> list[str]:
    """Lines "key  value  origin", one a leaf, in columns."""
    rows = [(leaf, to_line(plain(value)), resolved.origins.get(leaf, DEFAULT)) for leaf, value in flatten(resolved.value)]
    key_width, value_width = (min(max((len(row[column]) for row in rows), default=0), 48) for column in (0, 1))
    return [f"{leaf:<{key_width}}  {value:<{value_width}}  {origin}" for leaf, value, origin in rows]


def dump(resolved: Resolved[Any]) -> str:
    """YAML with every value written out; `load` of it gives an equal value."""
    return to_yaml(plain(resolved.value))
