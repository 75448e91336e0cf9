"""What holds for every source file: a docstring that says what it is, a readable size, a test beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src/tandem").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "src/tandem")))
def test_a_source_file_explains_itself_and_stays_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "a module says what it is and is not"
    assert len(text.splitlines()) <= 500, "a file of this length is two files"
    assert not {"utils", "helpers", "common", "base", "misc"} & set(path.with_suffix("").parts)


def broad_excepts(tree: ast.AST) -> list[int]:
    """Lines of `except:`, `except Exception` and `except BaseException`."""
    handlers = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    broad = {"Exception", "BaseException"}
    return [
        handler.lineno
        for handler in handlers
        if handler.type is None or any(isinstance(name, ast.Name) and name.id in broad for name in ast.walk(handler.type))
    ]


SUPERVISED_EDGES = {
    "durable.py": 1,  # what is written beside the run
    "launch.py": 1,  # a run whose worker died, whatever that was called where it was noticed
    "rewards/child.py": 1,  # a reward's call
    "runtime/link.py": 1,  # what another process asks
    "runtime/objects.py": 1,  # what is asked through Ray
    "trainer/episodes.py": 1,  # an agent's task
}


def test_broad_excepts_stand_only_at_the_supervised_edges() -> None:
    found = {
        str(path.relative_to(ROOT / "src/tandem")): len(broad_excepts(ast.parse(path.read_text(encoding="utf-8"))))
        for path in FILES
    }
    assert {path: count for path, count in found.items() if count} == SUPERVISED_EDGES
