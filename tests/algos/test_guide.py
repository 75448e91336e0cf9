"""docs/guides/algorithms.md: each setting that it names is one that `configure` takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from tandem.algos.table import ALGORITHMS, configure, parameter_types
from tandem.config import Resolved, load
from tandem.recipe import Recipe

GUIDE = (Path(__file__).parents[2] / "docs/guides/algorithms.md").read_text(encoding="utf-8")


def settings() -> list[dict[str, Any]]:
    """Of each row of the guide's tables, those of its last cell that read as settings of an algorithm."""
    found: list[dict[str, Any]] = []
    for line in GUIDE.splitlines():
        if not line.startswith("| ") or "---" in line:
            continue
        parts = [part for part in re.findall(r"`([^`]+)`", line.rstrip("| ").rpartition("|")[2]) if re.match(r"\w+: [^X]", part)]
        if parts:
            found.append({name: value for part in parts for name, value in cast("dict[str, Any]", yaml.safe_load(part)).items()})
    return found


@pytest.mark.parametrize("given", settings(), ids=str)
def test_what_a_table_says_can_be_configured(given: dict[str, Any]) -> None:
    """By the row that it names, or by the first one that has such parameters."""
    params = {key: float(value) if re.fullmatch(r"[0-9.]+e-[0-9]+", str(value)) else value for key, value in given.items()}
    if params.pop("normalize", False):
        params["correction"] = {"token_tis": {"normalize": True}}
    if params.get("denominator") == "kept":
        params.setdefault("correction", "token_tis")
    takers = (name for name, row in ALGORITHMS.items() if params.keys() <= parameter_types(row).keys())
    name = params.pop("name", None) or next(takers)
    if name == "dr_grpo":
        params["length_constant"] = 8.0
    configure(name, params)


def recipes() -> list[str]:
    """The settings that stand in the text as `algorithm={...}`."""
    return re.findall(r"`(algorithm=[^`]+)`", GUIDE.replace("\n", " "))


@pytest.mark.parametrize("override", recipes())
def test_what_the_text_says_is_an_override(override: str) -> None:
    resolved: Resolved[Recipe] = load(Path(__file__).parents[2] / "recipes/quickstart.yaml", [override], Recipe)
    section = resolved.value.algorithm
    configure(section.name, section.params)


def test_there_is_something_to_read() -> None:
    assert len(settings()) > 40
    assert len(recipes()) > 5
