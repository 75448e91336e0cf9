"""Every default of a function and every row of the table, with the columns that it needs, frozen in defaults.txt.

A recipe that names no value gets these, so a default that changes by accident changes what people train with. To change
one on purpose, change its line; the paper or framework that it comes from is in the function's docstring or the row.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import tandem.algos
from tandem.algos.columns import credit_gives, credit_needs, derived_columns
from tandem.algos.rows import ROWS
from tandem.algos.table import ALGORITHMS

FILE = Path(__file__).parent / "defaults.txt"


def lines() -> list[str]:
    found: list[str] = []
    for path in sorted(Path(tandem.algos.__path__[0]).glob("*.py")):
        module = importlib.import_module(f"tandem.algos.{path.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                parameters = inspect.signature(function).parameters.values()
                given = [f"{each.name}={each.default!r}" for each in parameters if each.default is not inspect.Parameter.empty]
                found += [f"{path.stem}.{name}: {each}" for each in given]
    for row in ROWS:
        parts = {"advantage": row.advantage, "loss": row.loss, "min_episodes": row.min_episodes, "keep": row.keep, **row.params}
        found += [f"row {row.name}: {key}={value!r}" for key, value in parts.items()]
        complete = ALGORITHMS[row.name]
        found.append(f"row {row.name}: an update reads {' '.join(sorted(complete.needs))}")
        if row.advantage is not None:
            found.append(f"row {row.name}: credit reads {' '.join(sorted(credit_needs(complete)))}")
            found.append(f"row {row.name}: credit gives {' '.join(sorted(credit_gives(complete)))}")
        derived = derived_columns(complete)
        found += [f"row {row.name}: {name} is made from {' '.join(sorted(derived[name]))}" for name in derived]
    return found


def test_defaults_are_those_of_the_list() -> None:
    got, want = lines(), FILE.read_text(encoding="utf-8").splitlines()
    changed = [*(f"+ {line}" for line in got if line not in want), *(f"- {line}" for line in want if line not in got)]
    assert not changed, f"lines of {FILE.name} to add (+) and to remove (-):\n" + "\n".join(changed)
    assert got == want, f"the lines of {FILE.name} are in another order"
