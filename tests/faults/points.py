"""The crash points that the code has."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from pathlib import Path

import tandem


def in_the_code() -> set[str]:
    """Their names; points are written as literals, or as one f-string for a family, in which * stands for what varies."""
    found: set[str] = set()
    for path in Path(tandem.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "crash_point":
                (name,) = node.args
                if isinstance(name, ast.Constant):
                    found.add(str(name.value))
                else:
                    assert isinstance(name, ast.JoinedStr)
                    found.add("".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values))
    return found


def without(killed: set[str]) -> set[str]:
    """Points of the code that none of these names."""
    return {point for point in in_the_code() if not any(fnmatchcase(name, point) for name in killed)}
