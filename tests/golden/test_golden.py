"""Numbers of independent implementations, each case with its provenance, against Tandem's functions.

TANDEM_GOLDEN_DIR names another directory of case files to replay instead of `cases/`.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.replay import Case, replay

CORPUS = Path(__file__).parent / "cases"
DIRECTORY = Path(os.environ.get("TANDEM_GOLDEN_DIR") or CORPUS)


def cases_in(directory: Path) -> list[Case]:
    return [case for path in sorted(directory.glob("*.json")) for case in json.loads(path.read_text())]


CASES = cases_in(DIRECTORY)
METRIC_TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden_case(case: Case) -> None:
    got = replay(case)
    for name, want in case["outputs"].items():
        if isinstance(want, dict):
            for metric, value in want.items():
                compare(got[name][metric], value, f"{name}.{metric}", METRIC_TOLERANCE)
        else:
            compare(got[name], want, name, case["tolerance"])


def compare(got: Any, want: Any, name: str, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(
        torch.tensor(got, dtype=torch.float64),
        torch.tensor(want, dtype=torch.float64),
        rtol=tolerance["rtol"],
        atol=tolerance["atol"],
        msg=lambda text: f"{name}: {text}",
    )


def test_every_case_of_the_corpus_is_here() -> None:
    assert len(cases_in(CORPUS)) == 236


ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
MATHEMATICS = {"exp", "log", "sqrt", "clamp", "cumsum", "softmax", "log_softmax", "where", "maximum", "minimum", "std", "var"}


def test_replay_computes_nothing() -> None:
    """It may rename, reshape and call; a loss or a formula of its own would prove nothing about the library."""
    tree = ast.parse((Path(__file__).parent / "replay.py").read_text(encoding="utf-8"))
    found = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC) and not _is_of_collections(node))
        or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant))
        or (isinstance(node, ast.Attribute) and node.attr in MATHEMATICS)
    ]
    assert found == []


def _is_of_collections(node: ast.BinOp) -> bool:
    """Lists may be joined."""
    return isinstance(node.op, ast.Add) and isinstance(node.right, ast.List)


def test_there_are_cases() -> None:
    assert CASES, f"no case files in {DIRECTORY}"
