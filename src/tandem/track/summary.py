"""summary.json: what a run achieved, in one small file for scripts.

{"eval_before": {"pass@1": 0.31, "greedy": 0.34, "n": 512, ...}, "eval_after": {...}, "steps": 60, "wall_s": 71.2, ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.durable import write_whole
from tandem.types import Json


@dataclass(frozen=True, slots=True)
class Summary:
    """eval_before and eval_after: rates in [0, 1] by name ("pass@1", "greedy", "pass@8", ...), the loss of a dataset's objective
    and what it measures beside ("loss", "preference_accuracy", ...), "n", the tasks, and "failed", the episodes that could not
    be judged; empty where nothing was measured.

    facts: more that belongs on record (seed, the hash of the final weights), beside the others in the file.
    """

    eval_before: Mapping[str, float]
    eval_after: Mapping[str, float]
    steps: int
    wall_s: float
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])


def write_summary(path: Path, summary: Summary) -> None:
    """Replaces the file as a whole; ValueError for NaN or infinity."""
    body: dict[str, Json] = {
        **summary.facts,
        "eval_before": dict(summary.eval_before),
        "eval_after": dict(summary.eval_after),
        "steps": summary.steps,
        "wall_s": round(summary.wall_s, 3),
    }
    write_whole(path, json.dumps(body, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
