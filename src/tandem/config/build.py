"""Builds a value of a schema from what was written, and reports every problem on the way.

The structure (sections, lists, mappings, merging, origins) is ours; what a single scalar may be is pydantic's strict JSON
mode. What a section's `__post_init__` refuses is a problem a line of its message, reported at the first key that the line names.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from tandem.config import schema as schemas
from tandem.config.document import Node, Origin
from tandem.config.schema import describe, join

_INVALID: Any = object()  # stands for a value whose problem has been reported


class Builder:
    """Builds from layers (the file, then each override, later ones win); fills `problems` and `origins`.

    complete: False where the file could not be read, so that what is missing may stand there. known: leaves of the whole
    schema, for advice on unknown keys.
    """

    def __init__(self, problems: list[str], *, source: Origin, complete: bool, known: Iterable[str]) -> None:
        self.problems = problems
        self.origins: dict[str, Origin] = {}
        self._source = source
        self._complete = complete
        self._elsewhere = {leaf.rsplit(".", 1)[-1]: leaf for leaf in reversed(tuple(known))}

    def build(self, schema: Any, layers: Sequence[Node], path: str, base: Any = None) -> Any:
        """`layers` are what is written at `path`; `base` is the section that fills what is not written."""
        schema, optional = schemas.without_none(schema)
        nulls = [index for index, layer in enumerate(layers) if layer.value is None]
        if optional and nulls:
            if nulls[-1] == len(layers) - 1:
                return self._found(path, layers[-1], None)
            layers, base = layers[nulls[-1] + 1 :], None
        if is_dataclass(schema):
            return self._section(cast("type[Any]", schema), layers, path, base)
        if get_origin(schema) in (dict, Mapping):
            return self._mapping(get_args(schema)[1], layers, path)
        if get_origin(schema) in (tuple, list):
            return self._sequence(schema, layers[-1], path)
        if schemas.is_open(schema):
            return self._anything(layers, path)
        assert not any(is_dataclass(kind) for kind in get_args(schema)), f"{path}: a choice of sections is not a schema"
        return self._scalar(schema, layers[-1], path)

    # -------------------------------------------------------------------------------------------------- sections

    def _section(self, schema: type[Any], layers: Sequence[Node], path: str, base: Any) -> Any:
        hints, extra = schemas.hints(schema), schemas.extra(schema)
        before = len(self.problems)
        given = [self._entries(schema, layer, path) for layer in layers]
        invalid = len(self.problems) > before  # a layer that is no section
        values: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        written: dict[str, Origin] = {key: node.origin for entries in given for key, node in entries.items()}
        for field in schemas.settable(schema):
            leaf = join(path, field.name)
            default = defaults[field.name] = schemas.default(field) if base is None else getattr(base, field.name)
            found = [entries[field.name] for entries in given if field.name in entries]
            if extra is not None and field.name == extra:
                found, leaf = [node for node in (self._free(entries, hints, extra, path) for entries in given) if node], path
            if found:
                values[field.name] = self.build(hints[field.name], found, leaf, default if is_dataclass(default) else None)
            elif default is not MISSING:
                values[field.name] = default
            elif is_dataclass(hints[field.name]) and not invalid:
                values[field.name] = self.build(hints[field.name], (), leaf)
            else:
                values[field.name] = _INVALID
                if self._complete and not invalid:
                    position = layers[0].origin if path and layers else self._source
                    self.problems.append(f"{position}: {leaf} is required and has no default: {describe(hints[field.name])}")
        if extra is None:
            for entries in given:
                self._unknown({key: node for key, node in entries.items() if key not in hints}, hints, path)
        if invalid:
            return _INVALID
        position = layers[-1].origin if path and layers else self._source
        return self._checked(schema, values, defaults, written, path, position)

    def _checked(
        self,
        schema: type[Any],
        values: dict[str, Any],
        defaults: dict[str, Any],
        written: dict[str, Origin],
        path: str,
        position: Origin,
    ) -> Any:
        """The section, if its own checks pass. They stop at the first problem, so what they blame is tried again as the default.

        suspects: keys with a problem that is reported; a check that blames one of them, or none by name, may only follow.
        """
        unknown = written.keys() - schemas.hints(schema).keys() if schemas.extra(schema) is None else set[str]()
        suspects = {name for name, value in values.items() if value is _INVALID} | unknown
        values = {name: defaults[name] if name in suspects else value for name, value in values.items()}
        while not any(value is MISSING or value is _INVALID for value in values.values()):
            try:
                made = schema(**values)
            except ValueError as error:
                blamed = next((word for word in _words(error) if word in written), None)
                if suspects.intersection(_words(error)) or (blamed is None and (suspects or not self._complete)):
                    break
                for line in str(error).splitlines():
                    at = next((written[word] for word in _words(line) if word in written), position)
                    self.problems.append(f"{at}: {path + ': ' if path else ''}{' '.join(line.split())}")
                if blamed not in values:
                    break
                suspects.add(blamed)
                values[blamed] = defaults[blamed]
            else:
                return _INVALID if suspects else made
        return _INVALID

    def _entries(self, schema: type[Any], layer: Node, path: str) -> dict[str, Node]:
        """The layer as a mapping of this section's keys; empty, with a problem, where it is none."""
        if layer.entries is not None:
            return layer.entries
        shorthand = schemas.shorthand(schema)
        if shorthand and layer.value is not None and layer.items is None:
            return {shorthand: layer}
        if path or layer.value is not None:
            keys = ", ".join(schemas.hints(schema))
            self.problems.append(f"{layer.origin}: {path or 'a recipe'} is a section with the keys {keys}; got {layer}")
        return {}

    def _free(self, entries: Mapping[str, Node], names: Mapping[str, Any], extra: str, path: str) -> Node | None:
        """What one layer says for the EXTRA field, under the field's own name or beside the other fields."""
        own = entries.get(extra)
        if own is not None and own.entries is None:
            return own
        inside = own.entries or {} if own is not None else {}
        for key in inside.keys() & names.keys():
            self.problems.append(
                f"{inside[key].origin}: {join(path, key)} is a key of its own; take it out of {join(path, extra)!r}"
            )
        free = inside | {key: node for key, node in entries.items() if key not in names}
        return Node(free, next(iter(free.values())).origin) if free else None

    # ---------------------------------------------------------------------------------------------- other values

    def _found(self, path: str, node: Node, value: Any) -> Any:
        self.origins[path] = node.origin
        return value

    def _sequence(self, schema: Any, node: Node, path: str) -> Any:
        kinds, items = get_args(schema), node.items
        if kinds[-1] is Ellipsis or get_origin(schema) is list:
            kinds = kinds[:1] * len(items or ())
        if items is None or len(items) != len(kinds):
            return self._mismatch(schema, node, path)
        values = [
            self.build(kind, (item,), join(path, str(index))) for index, (kind, item) in enumerate(zip(kinds, items, strict=True))
        ]
        return _INVALID if any(value is _INVALID for value in values) else self._found(path, node, get_origin(schema)(values))

    def _mapping(self, schema: Any, layers: Sequence[Node], path: str) -> Any:
        merged: dict[str, list[Node]] = {}
        for layer in layers:
            if layer.entries is None:
                return self._mismatch(dict[str, schema], layer, path)
            for key, node in layer.entries.items():
                merged.setdefault(key, []).append(node)
        values = {key: self.build(schema, nodes, join(path, key)) for key, nodes in merged.items()}
        return _INVALID if any(value is _INVALID for value in values.values()) else self._found(path, layers[-1], values)

    def _anything(self, layers: Sequence[Node], path: str) -> Any:
        if layers[-1].entries is None:
            return self._found(path, layers[-1], layers[-1].plain())
        others = [index for index, layer in enumerate(layers) if layer.entries is None]
        return self._mapping(Any, layers[others[-1] + 1 if others else 0 :], path)

    def _scalar(self, schema: Any, node: Node, path: str) -> Any:
        for candidate in (node.plain(), *(() if node.text is None else (node.text,))):
            try:
                value = _adapter(schema).validate_json(json.dumps(candidate), strict=True)
            except ValidationError:
                continue
            return self._found(path, node, value)
        return self._mismatch(schema, node, path)

    # ------------------------------------------------------------------------------------------------- reporting

    def _mismatch(self, schema: Any, node: Node, path: str) -> Any:
        choices = [str(choice) for choice in get_args(schema)] if get_origin(schema) is Literal else []
        near = difflib.get_close_matches(str(node.value), choices, n=1)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        if schema is str and isinstance(node.value, bool | int | float):
            advice = "; put it in quotes"
        self.problems.append(f"{node.origin}: {path}: expected {describe(schema)}, got {node}{advice}")
        return _INVALID

    def _unknown(self, nodes: Mapping[str, Node], names: Mapping[str, Any], path: str) -> None:
        for key, node in nodes.items():
            near = [join(path, name) for name in difflib.get_close_matches(key, names, n=1)]
            near += [self._elsewhere[name] for name in difflib.get_close_matches(key, self._elsewhere, n=1)]
            advice = f"did you mean {near[0]!r}?" if near else f"{path or 'a recipe'} has {', '.join(names)}"
            self.problems.append(f"{node.origin}: unknown key {join(path, key)!r}; {advice}")


def _words(message: object) -> list[str]:
    return re.findall(r"\w+", str(message))


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)
