"""The mutants themselves, and that each reason for one that survives is still about one that is made."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutants import page
from tests.mutants.mutations import Source
from tests.mutants.runner import sources

CODE = '''
"""A text: 1 + 1."""
LIMIT: float = 2.0


def f(a: float, b: float = 0.5, *, low: int = 3) -> float:
    """Not 1 + 1 either."""
    check(a < b, f"{a + b}")
    assert a + b, "no"
    try:
        return {"a": max(a, b).clamp(min=-low)}
    except ValueError:
        raise ValueError(a - b)
'''
CHANGES = [
    *(("", "2.0 -> 4.0"), ("f", "low=3 -> low=4"), ("f", "b=0.5 -> b=1.0"), ("f", "dropped")),
    *(("f", "a < b -> a <= b"), ("f", "a < b -> a >= b"), ("f", "{'a': max(a, b).clamp(min=-low)} without 'a'")),
    *(("f", "max(a, b).clamp(min=-low) -> max(a, b)"), ("f", "max(a, b).clamp(min=-low) without min")),
    *(("f", "max(a, b) -> min(a, b)"), ("f", "min=-low -> min=low"), ("f", "dropped")),
]


def test_each_change_is_made_once_and_texts_and_types_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(CODE)
    source = Source("code", file)
    assert [(mutant.function, mutant.change) for mutant in source.mutants] == CHANGES
    codes = {source.code(mutant) for mutant in source.mutants}
    assert len(codes) == len(CHANGES)
    assert ast.dump(source.tree) == ast.dump(ast.parse(CODE))


def test_names_of_mutants_are_unique_and_every_reason_is_for_one_that_is_made() -> None:
    names = [str(mutant) for source in sources() for mutant in source.mutants]
    assert len(names) == len(set(names))
    gone = page.reasons().keys() - set(names)
    assert not gone, "equivalent.toml explains mutants that are no longer made:\n" + "\n".join(sorted(gone))
