"""What a dataclass says about the recipes that it accepts, and a value of it as leaves or as plain YAML.

Nothing is read or checked here; `build` does that.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ForwardRef, Literal, Union, cast, get_args, get_origin, get_type_hints

_UNIONS = (Union, types.UnionType)
_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    type(None): "null",
}


def leaves(schema: Any, path: str = "") -> tuple[str, ...]:
    """Every dotted leaf that a recipe of this schema may set; `*` stands for a free key or a position in a list."""
    schema, _ = without_none(schema)
    kind = get_origin(schema)
    if is_dataclass(schema):
        members = hints(cast("type[Any]", schema)).items()
        return tuple(leaf for name, hint in members for leaf in leaves(hint, join(path, "" if name == extra(schema) else name)))
    if kind in (dict, Mapping):
        return leaves(get_args(schema)[1], join(path, "*"))
    if kind in (tuple, list) and is_dataclass(get_args(schema)[0]):
        return leaves(get_args(schema)[0], join(path, "*"))
    return (path,)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def settable(schema: Any) -> list[Field[Any]]:
    return [field for field in fields(schema) if field.init]


@cache
def hints(schema: type[Any]) -> dict[str, Any]:
    """Types by field, in order."""
    known = get_type_hints(schema, include_extras=True)
    return {field.name: known[field.name] for field in settable(schema)}


def default(field: Field[Any]) -> Any:
    """The field's default, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def shorthand(schema: Any) -> str | None:
    return getattr(schema, "SHORTHAND", None)


def extra(schema: Any) -> str | None:
    return getattr(schema, "EXTRA", None)


def without_none(schema: Any) -> tuple[Any, bool]:
    """The schema without None, and whether None was one of its choices."""
    if get_origin(schema) not in _UNIONS or type(None) not in get_args(schema) or is_open(schema):
        return schema, False
    return Union[tuple(kind for kind in get_args(schema) if kind is not type(None))], True  # noqa: UP007


def is_open(schema: Any) -> bool:
    """True for `Json` and the like: whatever YAML can say."""
    if get_origin(schema) in _UNIONS:
        return any(get_origin(kind) is list and isinstance(get_args(kind)[0], ForwardRef) for kind in get_args(schema))
    return schema in (Any, object) or isinstance(schema, ForwardRef)


def describe(schema: Any) -> str:
    """What a value of this type looks like to the author of a recipe."""
    kind, arguments = get_origin(schema), get_args(schema)
    if kind is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if kind in _UNIONS and not is_open(schema):
        return " or ".join(describe(argument) for argument in arguments)
    if kind is tuple and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)} values"
    if kind in (tuple, list):
        return f"a list, each entry {describe(arguments[0])}"
    if kind in (dict, Mapping):
        return "a mapping"
    return "a section" if is_dataclass(schema) else _NAMES.get(schema, "a value")


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves in order. A list is a leaf unless it holds sections; an empty mapping is a leaf, an empty EXTRA is nothing."""
    if is_dataclass(value):
        for field in settable(value):
            member = getattr(value, field.name)
            if field.name != extra(value):
                yield from flatten(member, join(path, field.name))
            elif member:
                yield from flatten(member, path)
    elif isinstance(value, Mapping) and value:
        for key, member in cast("Mapping[str, Any]", value).items():
            yield from flatten(member, join(path, key))
    elif isinstance(value, tuple | list) and any(is_dataclass(member) for member in cast("Sequence[Any]", value)):
        for index, member in enumerate(cast("Sequence[Any]", value)):
            yield from flatten(member, join(path, str(index)))
    else:
        yield path, value


def plain(value: Any) -> Any:
    """What YAML can write, in the shape in which a recipe says it."""
    if is_dataclass(value):
        members = {field.name: plain(getattr(value, field.name)) for field in settable(value)}
        free = members.pop(extra(value) or "", {})
        return members | free
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, tuple | list):
        return [plain(member) for member in cast("Sequence[Any]", value)]
    return str(value) if isinstance(value, Path) else value
