"""Numbers of independent implementations, each case with its provenance, against Tandem's functions.

TANDEM_GOLDEN_DIR names another directory of case files to replay instead of `cases/`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.replay import Case, replay

DIRECTORY = Path(os.environ.get("TANDEM_GOLDEN_DIR") or Path(__file__).parent / "cases")
CASES: list[Case] = [case for path in sorted(DIRECTORY.glob("*.json")) for case in json.loads(path.read_text())]
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


def test_there_are_cases() -> None:
    assert CASES, f"no case files in {DIRECTORY}"
