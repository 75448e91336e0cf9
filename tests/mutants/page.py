"""What is known of the mutants, in results.json, and the page docs/mutation.md that is made of it and of equivalent.toml."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.mutations import Source
from tests.mutants.runner import EXCLUDED, ROOT, Fate, sources

HERE = Path(__file__).parent
RESULTS, REASONS, PAGE = HERE / "results.json", HERE / "equivalent.toml", ROOT / "docs" / "mutation.md"
NEEDED = 0.95


@dataclass(frozen=True)
class Result:
    """Of one module. of: the first digits of the SHA-256 of its file. survivors: mutants by name."""

    of: str
    killed: int
    hang: int
    stillborn: int
    survivors: tuple[str, ...]

    @property
    def counted(self) -> int:
        return self.killed + self.hang + len(self.survivors)


def result(source: Source, fates: dict[str, Fate]) -> Result:
    """Of a module all of whose mutants have met their fate."""
    found = Counter(fates.values())
    survivors = tuple(name for name, fate in fates.items() if fate == Fate.SURVIVED)
    return Result(digest(source), found[Fate.KILLED], found[Fate.HANGS], found[Fate.STILLBORN], survivors)


def digest(source: Source) -> str:
    return hashlib.sha256(source.path.read_bytes()).hexdigest()[:8]


def read() -> dict[str, Result]:
    if not RESULTS.exists():
        return {}
    return {
        name: Result(**{**each, "survivors": tuple(each["survivors"])}) for name, each in json.loads(RESULTS.read_text()).items()
    }


def write(results: dict[str, Result]) -> None:
    """Both files."""
    ordered = {name: asdict(results[name]) for name in sorted(results)}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results, reasons()), encoding="utf-8")


def reasons() -> dict[str, str]:
    """Why a mutant, by name, cannot be told from the original."""
    found = tomllib.loads(REASONS.read_text(encoding="utf-8")) if REASONS.exists() else {}
    return {mutant: each["why"] for each in found.get("equivalent", []) for mutant in each["mutants"]}


def score(results: dict[str, Result]) -> float:
    """Killed mutants of those that count; equivalent ones count as survivors."""
    counted = sum(each.counted for each in results.values())
    return 1 - sum(len(each.survivors) for each in results.values()) / counted if counted else 1.0


def page(results: dict[str, Result], why: dict[str, str]) -> str:
    survivors = [name for _, each in sorted(results.items()) for name in each.survivors]
    rows = [
        f"| `{name.rpartition('.')[2]}` | {each.of} | {each.counted} | {each.killed} | {each.hang} | {len(each.survivors)} |"
        for name, each in sorted(results.items())
    ]
    total = [
        sum(column) for column in zip(*((e.counted, e.killed, e.hang, len(e.survivors)) for e in results.values()), strict=True)
    ]
    by_reason: dict[str, list[str]] = {}
    for name in survivors:
        by_reason.setdefault(why.get(name, ""), []).append(name)
    unexplained = by_reason.pop("", [])
    lines = [
        *(TEXT.format(score=f"{100 * score(results):.1f}", survivors=len(survivors)).splitlines()),
        *("", "| module | of | mutants | killed | hang | survive |", "| --- | --- | ---: | ---: | ---: | ---: |", *rows),
        f"| all | | {' | '.join(map(str, total))} |",
        "",
        *(f"Module `{each}` has not been run to its end." for each in _missing(results)),
        *(f"Module `{name}` is left out: {reason}." for name, reason in EXCLUDED.items()),
        *("", "## Survivors that no test can kill", ""),
    ]
    for reason, names in by_reason.items():
        lines += [reason, "", "```", *names, "```", ""]
    if unexplained:
        lines += ["## Survivors that a test could kill", "", "```", *unexplained, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _missing(results: dict[str, Result]) -> list[str]:
    return [each.module.rpartition(".")[2] for each in sources() if each.mutants and each.module not in results]


TEXT = """# Mutation check

How good are the tests of the arithmetic? Small faults are put into `src/tandem/algos` one at a time, by a walk over its
syntax trees (`tests/mutants/mutations.py`): another operator, sign, constant or comparison; a dropped stop-gradient,
clamp, mask, argument, dictionary entry or check; swapped arguments; `min` for `max`, `sum` for `mean`, `any` for `all`,
`not`. Then the tests of `tests/golden` and `tests/algos` run until one fails: for a fault in a function those that run its
line, the most specific ones first; for a default, a constant or the table all of them. Before these come the tests that have
killed a mutant of the same function, or module. The laws and `test_unbiased.py` run over the same functions and take ten times as
long; they are left out, and a mutant that only they would find counts as a survivor.

**{score} % are killed**, and {survivors} survive. Survivors that are equivalent, so that no test could kill them, count
against the score too. A mutant that makes a loop endless is killed by a limit of processor time (column "hang"). One whose
module cannot be imported is not counted.

`make mutants` repeats it, in 35 minutes of processor time and at most 40 more for the table, and fails below 95 %;
`make mutants ONLY=tandem.algos.kl` is for one module. A row below is of a whole run of its module, and is there as soon as that has
ended. Both write this page and `tests/mutants/results.json`; the reasons below are those of
`tests/mutants/equivalent.toml`. Column "of" is the start of the SHA-256 of the file that was mutated.

Strings are not mutated: names of modes, columns and metrics, where another name is an unknown name, and texts. Nor are
docstrings, annotations, asserts, the texts of errors and the devices of tensors, which are all one on a CPU."""
