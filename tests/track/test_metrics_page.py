"""docs/metrics.md names every metric that a run logs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/metrics.md"


def documented() -> list[re.Pattern[str]]:
    """The first column of the tables; capitals and dots stand for anything, and a name without "/" has the prefix before it."""
    patterns: list[re.Pattern[str]] = []
    for cells in re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        prefix = ""
        for name in re.findall(r"`([^`]+)`", cells):
            prefix = name.partition("/")[0] if "/" in name else prefix
            whole = name if "/" in name else f"{prefix}/{name}"
            patterns.append(re.compile(re.sub(r"\\\.\\\.\\\.|[A-Z]+", ".+", re.escape(whole))))
    return patterns


def undocumented(names: set[str]) -> set[str]:
    patterns = documented()
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}


def test_the_page_is_read_as_it_is_meant() -> None:
    assert undocumented({"reward/mean", "queue/rows", "eval/pass@8", "time/stage_advantages_s", "staleness/rows_of_age_2"}) == set()
    assert undocumented({"reward", "train/unheard_of", "queue/depth"}) == {"reward", "train/unheard_of", "queue/depth"}
