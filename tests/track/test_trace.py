"""trace.json: what a viewer reads of it."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tandem.track.trace import Span, TraceTracker
from tandem.types import Metrics

STEP = Metrics.sum({f"time/{part}_s": seconds for part, seconds in (("rollout", 4), ("plan", 1), ("update", 2), ("publish", 1))})


def events(path: Path, end: str = "") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text().rstrip(",\n") + end) if event["ph"] == "X"]


def test_a_step_s_parts_follow_each_other_up_to_when_it_is_logged(tmp_path: Path) -> None:
    tracker = TraceTracker(tmp_path / "trace.json", lambda: [Span("groups", "sample train:0", 10.0, 10.5)], clock=lambda: 20.0)
    tracker.log(STEP + Metrics.sum({"time/step_s": 9}), 3)
    tracker.log(Metrics.mean({"eval/pass@1": 0.5}), 3)
    tracker.close()
    found = [(event["name"], event["ts"], event["dur"]) for event in events(tmp_path / "trace.json")]
    second = 1_000_000
    assert found == [
        ("sample train:0", 10 * second, second // 2),
        *(("wait 3", 11 * second, 4 * second), ("plan 3", 15 * second, second)),
        *(("update 3", 16 * second, 2 * second), ("publish 3", 18 * second, second)),
    ]


def test_a_killed_run_s_trace_can_be_read_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    killed = TraceTracker(path, tuple)
    killed.log(STEP + Metrics.sum({"time/step_s": 9}), 1)
    state = killed.state()
    killed.log(STEP + Metrics.sum({"time/step_s": 9}), 2)
    assert [event["name"][-1] for event in events(path, "]")] == ["1"] * 4 + ["2"] * 4
    killed.close()
    resumed = TraceTracker(path, tuple)
    resumed.restore(state)
    resumed.log(STEP + Metrics.sum({"time/step_s": 9}), 2)
    resumed.close()
    assert [event["name"] for event in events(path)] == [
        f"{part} {step}" for step in (1, 2) for part in ("wait", "plan", "update", "publish")
    ]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_spans_of_one_row_do_not_overlap_whatever_order_they_come_in(drawn: list[tuple[int, int]]) -> None:
    spans = [Span("groups", str(i), float(began), float(began + lasted)) for i, (began, lasted) in enumerate(drawn)]
    with TemporaryDirectory() as directory:
        tracker = TraceTracker(Path(directory) / "trace.json", lambda: spans)
        tracker.log(Metrics.sum({"time/step_s": 1}), 1)
        tracker.close()
        rows: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for event in events(Path(directory) / "trace.json"):
            rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, rows.values())) == len(spans)
    for row in rows.values():
        row.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(row))
