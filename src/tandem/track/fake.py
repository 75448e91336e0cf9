"""A Tracker for tests: keeps what it is told in a list."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.types import Json, Metrics


class ListTracker:
    """Implements ports.Tracker; `lines` holds (step, metrics) in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, Metrics]] = []
        self.closed = False

    def log(self, metrics: Metrics, step: int) -> None:
        self.lines.append((step, metrics))

    def state(self) -> dict[str, Json]:
        return {"lines": len(self.lines)}

    def restore(self, state: Mapping[str, Json]) -> None:
        count = state.get("lines", 0)
        assert isinstance(count, int), f"state {dict(state)} is not a list tracker's"
        del self.lines[count:]

    def close(self) -> None:
        self.closed = True
