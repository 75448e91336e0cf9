"""When what was under way on the generating side: spans for a trace, and how long nothing was."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tandem.track.trace import Span
from tandem.types import GroupKey

_EPOCH_S = time.time() - time.perf_counter()  # so that it never goes back


def _now_s() -> float:
    return _EPOCH_S + time.perf_counter()


class Timeline:
    """Generation works while an episode is under way and the engines are not held; an episode that waits for a tool counts.

    clock: seconds of time.time().
    """

    def __init__(self, clock: Callable[[], float] = _now_s) -> None:
        self._clock = clock
        self._spans: list[Span] = []
        self._sampling = self._holds = 0
        self._from_s: float | None = None  # since when generation works
        self._worked_s, self._taken_s = 0.0, clock()

    @contextmanager
    def sampling(self, group: GroupKey) -> Generator[None]:
        began_s = self._clock()
        self._sampling += 1
        self._change()
        try:
            yield
        finally:
            self._sampling -= 1
            self._change()
            self._spans.append(Span("groups", f"sample {group}", began_s, self._clock()))

    @contextmanager
    def judging(self, group: GroupKey) -> Generator[None]:
        began_s = self._clock()
        try:
            yield
        finally:
            self._spans.append(Span("groups", f"judge {group}", began_s, self._clock()))

    @contextmanager
    def held(self) -> Generator[None]:
        """Engines are paused."""
        self._holds += 1
        self._change()
        try:
            yield
        finally:
            self._holds -= 1
            self._change()

    def take(self) -> tuple[tuple[Span, ...], float]:
        """Since it was taken last: the spans that ended, and the seconds in which generation did not work."""
        self._pause()
        now_s = self._clock()
        idle_s = max(0.0, now_s - self._taken_s - self._worked_s)
        spans, self._spans = tuple(self._spans), []
        self._worked_s, self._taken_s = 0.0, now_s
        self._change()
        return spans, idle_s

    def _change(self) -> None:
        if not self._sampling or self._holds:
            self._pause()
        elif self._from_s is None:
            self._from_s = self._clock()

    def _pause(self) -> None:
        if self._from_s is not None:
            now_s = self._clock()
            self._spans.append(Span("generation", "generate", self._from_s, now_s))
            self._worked_s += now_s - self._from_s
            self._from_s = None
