"""summary.json: what a run achieved, in one small file for scripts.

{"eval_before": {"pass@1": 0.31, "greedy": 0.34, "n": 512, "max_tokens": 16, ...}, "eval_after": {...}, "steps": 60, ...}

Where evaluation.max_tokens is not what episodes of training have, those rates are under that limit, and the ones under the limit
of training stand beside them: "training_limit": {"eval_before": {...}, "eval_after": {...}}. A run that was resumed with another
limit has another max_tokens after than before, and rates that do not compare.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tandem.durable import write_whole
from tandem.errors import SnapshotError
from tandem.types import Json

TRAINING_LIMIT = "training_limit"  # begins the names of what was measured under it
_PREFIX = f"{TRAINING_LIMIT}/"


@dataclass(frozen=True, slots=True)
class Summary:
    """eval_before and eval_after: rates in [0, 1] by name ("pass@1", "greedy", "pass@8", ...), the mean "reward" where it
    is another number than pass@1, the loss of a dataset's objective and what it measures beside ("loss", "preference_accuracy",
    ...), "n", the tasks, and of episodes "failed", those that could not be judged, and "max_tokens", the new tokens of one at
    most; empty where nothing was measured.

    facts: more that belongs on record (seed, the hash of the final weights, peaks of memory and what was planned), beside the
    others in the file.
    """

    eval_before: Mapping[str, float]
    eval_after: Mapping[str, float]
    steps: int
    wall_s: float
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])


def read_summary(path: Path) -> Summary | None:
    """What `write_summary` wrote there; None where it did not. Raises SnapshotError for a file of something else."""
    if not path.is_file():
        return None
    try:
        body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {name: body.pop(name) for name in ("eval_before", "eval_after", "steps", "wall_s")}
        for when, rates in body.pop(TRAINING_LIMIT, {}).items():
            known[when] |= {f"{_PREFIX}{name}": rate for name, rate in rates.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SnapshotError(f"{path} is not the summary of a run: {error!r}") from error
    return Summary(**known, facts=body)


def write_summary(path: Path, summary: Summary) -> None:
    """Replaces the file as a whole; ValueError for NaN or infinity."""
    found = {"eval_before": summary.eval_before, "eval_after": summary.eval_after}
    cut = {
        when: {name.removeprefix(_PREFIX): rate for name, rate in rates.items() if name.startswith(_PREFIX)}
        for when, rates in found.items()
    }
    body: dict[str, Json] = {
        **summary.facts,
        **{when: {name: rate for name, rate in rates.items() if not name.startswith(_PREFIX)} for when, rates in found.items()},
        **({TRAINING_LIMIT: cast("Json", cut)} if any(cut.values()) else {}),
        "steps": summary.steps,
        "wall_s": round(summary.wall_s, 3),
    }
    write_whole(path, json.dumps(body, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
