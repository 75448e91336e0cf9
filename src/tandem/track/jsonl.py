"""metrics.jsonl: one line a step, {"step": 3, "time": 1790000000.0, "train/loss": 0.21, ...}; and reading it back.

A value that is NaN or infinite is no JSON: it is written as null, and its name is listed under "nonfinite".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.durable import AppendLog, records
from tandem.errors import ColumnError
from tandem.types import Json, Metrics

_OWN = frozenset({"step", "time", "nonfinite"})


class JsonlTracker:
    """Implements ports.Tracker."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._log = AppendLog(path)
        self._clock = clock

    def log(self, metrics: Metrics, step: int) -> None:
        values = metrics.values_by_name()
        if taken := _OWN & values.keys():
            raise ColumnError(f"a metric cannot be called {', '.join(sorted(taken))}: that is a field of every line")
        nonfinite: list[Json] = [name for name, value in values.items() if not math.isfinite(value)]
        record: dict[str, Json] = {"step": step, "time": round(self._clock(), 3)}
        record.update((name, None if name in nonfinite else value) for name, value in values.items())
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._log.append(record)

    def state(self) -> dict[str, Json]:
        return {"offset": self._log.offset()}

    def restore(self, state: Mapping[str, Json]) -> None:
        self._log.truncate(offset_of(state))

    def close(self) -> None:
        self._log.close()


def offset_of(state: Mapping[str, Json]) -> int:
    """The offset in a log's `state()`; 0 for the beginning."""
    offset = state.get("offset", 0)
    assert isinstance(offset, int), f"state {dict(state)} is not that of a log"
    return offset


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps that logged it."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


def read_series(path: Path, metric: str) -> Series:
    """The finite values of `metric` in a metrics.jsonl, in the order of its lines."""
    return series_of(records(path), metric)


def series_of(lines: Iterable[Mapping[str, Json]], metric: str) -> Series:
    """The same of lines that were read."""
    pairs: list[tuple[int, float]] = []
    for record in lines:
        step, value = record["step"], record.get(metric)
        if isinstance(step, int) and isinstance(value, int | float):
            pairs.append((step, value))
    return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))
