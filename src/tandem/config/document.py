"""What stands in a recipe file or an override, as a tree of values that know where they were written.

No schema is known here. Scalars follow the core schema of YAML 1.2; NaN is left out, since it is never a setting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import yaml

Origin: TypeAlias = str

_MAX_DIGITS = 4300  # of an integer: Python reads no longer ones

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[Any] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[Any] = {}


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = text.replace("\n", "").isprintable()  # other line breaks do not survive unless they are escaped
    return dumper.represent_scalar(f"{_TAG}str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)

_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10)),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)",
        lambda text: float(re.sub(r"\.(?=[iI])", "", text)),
    ),
}
for _name, (_pattern, _) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"(?:{_pattern})\Z"), None)


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, a list of nodes or a dict of nodes. text: what stood after an override's `=`, to be used where text is expected."""

    value: Any
    origin: Origin
    text: str | None = None

    @property
    def entries(self) -> dict[str, Node] | None:
        """The nodes by key of a mapping, else None."""
        return cast("dict[str, Node]", self.value) if isinstance(self.value, dict) else None

    @property
    def items(self) -> list[Node] | None:
        """The nodes of a list, else None."""
        return cast("list[Node]", self.value) if isinstance(self.value, list) else None

    def plain(self) -> Any:
        if self.entries is not None:
            return {key: node.plain() for key, node in self.entries.items()}
        return [node.plain() for node in self.items] if self.items is not None else self.value

    def __str__(self) -> str:
        kinds = {str: "text", bool: "true or false", int: "an integer", float: "a number", list: "a list", dict: "a mapping"}
        return next((f"{to_line(self.plain())} ({name})" for kind, name in kinds.items() if type(self.value) is kind), "nothing")


def read_file(path: Path, problems: list[str]) -> Node | None:
    """The tree of a YAML file, with "FILE:LINE" as origins; None, with the reason in `problems`, where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
        root = _compose(text)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        problems.append(f"{path}: is not UTF-8 text (byte {error.start}); a recipe is a YAML file")
    except yaml.MarkedYAMLError as error:
        position = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else f"{path}"
        problems.append(f"{position}: not YAML: {' '.join(filter(None, (error.problem, error.context)))}")
    except yaml.YAMLError as error:
        problems.append(f"{path}: not YAML: {' '.join(str(error).split())}")
    else:
        if root is None:
            return Node({}, str(path))
        return _Reader(lambda node: f"{path}:{node.start_mark.line + 1}", problems).read(root, ())
    return None


def read_override(text: str, problems: list[str]) -> Node | None:
    """The tree that "a.b=value" stands for; None, with the reason in `problems`, where it is not of that form."""
    origin = f"command line: {text}"
    path, equals, value = text.partition("=")
    keys = path.split(".")
    if not equals or not all(keys) or any(character.isspace() for character in path):
        problems.append(f"{origin}: an override is written KEY=VALUE with dots in the key, for example train.lr=1e-3")
        return None
    try:
        root = _compose(value)
        node = Node(_Reader(lambda _: origin, problems).read(root, ()).value if root else None, origin, text=value)
    except yaml.YAMLError:
        node = Node(value, origin)
    for key in reversed(keys):
        node = Node({key: node}, origin)
    return node


def to_yaml(value: Any) -> str:
    """Several lines of YAML that `read_file` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def to_line(value: Any) -> str:
    """The value on one line, as a recipe or an override would say it."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.strip().removesuffix("\n...")


def _compose(text: str) -> yaml.Node | None:
    try:
        return cast("yaml.Node | None", yaml.compose(text, Loader=_Loader))  # pyright: ignore[reportUnknownMemberType]
    except RecursionError:
        raise yaml.YAMLError("its lists and sections are nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _Reader:
    where: Callable[[yaml.Node], Origin]
    problems: list[str]

    def read(self, node: yaml.Node, parents: tuple[yaml.Node, ...], origin: Origin | None = None) -> Node:
        origin = origin or self.where(node)
        inside = (*parents, node)
        if any(parent is node for parent in parents):
            self.problems.append(f"{origin}: this alias contains itself")
            return Node(None, origin)
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node, inside), origin)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.read(child, inside) for child in node.value], origin)
        return Node(self._scalar(node, origin), origin)

    def _mapping(self, node: yaml.MappingNode, inside: tuple[yaml.Node, ...]) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            here = self.where(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"{here}: a key must be a plain word")
                continue
            key: str = key_node.value
            if key in entries:
                self.problems.append(f"{here}: key {key!r} is given twice; first at {entries[key].origin}")
                continue
            entries[key] = self.read(value_node, inside, here)
        return entries

    def _scalar(self, node: yaml.Node, origin: Origin) -> Any:
        name = str(node.tag).removeprefix(_TAG)
        if name in _SCALARS and re.fullmatch(_SCALARS[name][0], node.value):
            text: str = node.value
            if name == "int" and len(text) > _MAX_DIGITS:
                text = text[:12]
                self.problems.append(f"{origin}: the integer {text}... has more than {_MAX_DIGITS} digits")
            return _SCALARS[name][1](text)
        if name != "str":
            self.problems.append(f"{origin}: {node.tag} {node.value!r} is not understood; write the value without a tag")
        return node.value
