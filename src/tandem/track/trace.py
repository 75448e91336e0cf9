"""trace.json: what ran when, in the Trace Event Format that chrome://tracing and ui.perfetto.dev open.

    trainer     | wait | plan | update | publish | wait ...      from the times that the loop logs of each step
    generation  | generate          | generate ...               whenever an episode was under way and the engines were not paused
    groups      | sample train:3 | judge train:3 |               each group's episodes, and the wait for their rewards

Spans of one track that overlap get rows of their own. A line a span: a tenth of what samples.jsonl has of the same group.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from tandem.durable import attempt
from tandem.track.jsonl import offset_of
from tandem.types import Json, Metrics

_PARTS = {"rollout": "wait", "plan": "plan", "update": "update", "publish": "publish"}
_TRACKS = ("trainer", "generation", "groups")
_END = json.dumps({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": _TRACKS[0]}}).encode() + b"]\n"


class Span(NamedTuple):
    """Something that lasted; seconds of time.time()."""

    track: Literal["trainer", "generation", "groups"]
    name: str
    began_s: float
    ended_s: float


class TraceTracker:
    """Implements ports.Tracker. spans: what else ended since it was asked last. clock: as that of the spans."""

    def __init__(self, path: Path, spans: Callable[[], Iterable[Span]], *, clock: Callable[[], float] = time.time) -> None:
        self._spans, self._clock = spans, clock
        self._rows: dict[str, list[float]] = {track: [] for track in _TRACKS}  # when the last span of each row ended
        with attempt(f"open {path}", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        self._begin()

    def log(self, metrics: Metrics, step: int) -> None:
        """Of metrics that are not a step's, nothing."""
        if "time/step_s" not in metrics:
            return
        spans = list(self._spans())
        at_s = self._clock() - metrics["time/step_s"].value
        for part, name in _PARTS.items():
            if (metric := metrics.get(f"time/{part}_s")) is not None:
                spans.append(Span("trainer", f"{name} {step}", at_s, at_s + metric.value))
                at_s += metric.value
        lines = [line for span in spans for line in self._lines(span)]
        with attempt(f"write {self._file.name}", Path(self._file.name)):
            self._file.write("".join(f"{json.dumps(line)},\n" for line in lines).encode())

    def _lines(self, span: Span) -> list[dict[str, Json]]:
        rows, process = self._rows[span.track], _TRACKS.index(span.track)
        row = next((row for row, end_s in enumerate(rows) if end_s <= span.began_s), len(rows))
        lines: list[dict[str, Json]] = []
        if row == len(rows):
            rows.append(0.0)
            lines.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": span.track}})
        rows[row] = span.ended_s
        began_us, lasted_us = round(1e6 * span.began_s), round(1e6 * (span.ended_s - span.began_s))
        lines.append({"ph": "X", "name": span.name, "pid": process, "tid": row, "ts": began_us, "dur": lasted_us})
        return lines

    def state(self) -> dict[str, Json]:
        return {"offset": self._file.tell()}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Also cuts off how an earlier process ended the file."""
        self._file.truncate(offset_of(state))
        self._begin()

    def _begin(self) -> None:
        if self._file.seek(0, os.SEEK_END) == 0:
            self._file.write(b"[\n")

    def close(self) -> None:
        """With an end that makes it strict JSON; without it, where the run was killed, both viewers read it too."""
        self._file.write(_END)
        self._file.close()
