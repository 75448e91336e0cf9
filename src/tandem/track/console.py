"""What one sees while a run goes on: a live line in a terminal; elsewhere a plain line now and then.

    GRPO ━━━━━━━━━━╸━━━━━━━━━ 24/60  0:31 left  reward 0.71  held-out 0.82  3,412 tokens/s

A live line is cut where the terminal ends, so that the time left comes first in it. It shows the last value of each field that it
is given, with the step that it is of where that is an earlier one, and computes nothing but the time left: from what a step took
since the first one, before which is what comes once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import rich.console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tandem.types import Json, Metrics


@dataclass(frozen=True, slots=True)
class Field:
    """A metric to show. pattern: how, e.g. "reward {:.2f}"."""

    metric: str
    pattern: str


class Console(rich.console.Console):
    """One that goes on where nobody reads any more (`tandem train ... | head`), and wraps lines in terminals alone: what a log is
    read with knows its own width.
    """

    def __init__(self, file: IO[str] | None = None, *, width: int | None = None) -> None:
        super().__init__(file=file, width=width)
        self.soft_wrap = not self.is_terminal

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # what is still buffered is flushed when the process ends
        os.close(nowhere)


class ConsoleTracker:
    """Implements ports.Tracker for one phase of `steps` steps.

    console: where to write; without a terminal behind it no control character is written, and a line at most every
    `plain_every_s` seconds, the first at once and that of the last step when all of it is known: in `close`.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        fields: Sequence[Field],
        *,
        console: rich.console.Console | None = None,
        plain_every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._steps, self._fields = title, steps, tuple(fields)
        self._console: rich.console.Console = console or Console()
        self._plain_every_s, self._clock = plain_every_s, clock
        self._last = 0
        self._first: tuple[int, float] | None = None  # the first step here, and when it had ended
        self._newest = (0, 0.0)  # likewise; what is measured after a step counts to the next one
        self._shown: dict[str, tuple[float, int]] = {}  # values, and the steps that they are of
        self._said: float | None = None
        self._unsaid: str | None = None  # the newest line, where it is not printed
        self._live: tuple[Progress, TaskID] | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.completed}/{task.total}  {task.fields[text]}", markup=False),
                console=self._console,
            )
            progress.start()
            self._live = (progress, progress.add_task(title, total=steps, text=""))

    def log(self, metrics: Metrics, step: int) -> None:
        now = self._clock()
        if step > self._last:
            self._newest = (step, now)
            self._first = self._first or self._newest
        self._last = step
        self._shown |= {name: (value, step) for name, value in metrics.values_by_name().items()}
        values, left = self._values(step), self._time_left(step)
        if self._live:
            progress, task = self._live
            progress.update(task, completed=step, text="  ".join([left, *values]))
            return
        self._unsaid = "  ".join([f"{self._title} {step}/{self._steps}", *values, left])
        if step < self._steps and (self._said is None or now - self._said >= self._plain_every_s):
            self._said = now
            self._say()

    def _say(self) -> None:
        if self._unsaid is not None:
            self._console.print(self._unsaid, markup=False, highlight=False, soft_wrap=True)
        self._unsaid = None

    def _values(self, step: int) -> list[str]:
        found = [(field.pattern, *self._shown[field.metric]) for field in self._fields if field.metric in self._shown]
        return [pattern.format(value) + (f" (step {of})" if of < step else "") for pattern, value, of in found]

    def _time_left(self, step: int) -> str:
        (newest, now), (first, since) = self._newest, self._first or self._newest
        if newest == first and step < self._steps:
            return "? left"
        seconds = round((now - since) / max(1, newest - first) * max(0, self._steps - step))
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02d}:{seconds % 60:02d} left" if hours else f"{minutes}:{seconds % 60:02d} left"

    def state(self) -> dict[str, Json]:
        return {"step": self._last}

    def restore(self, state: Mapping[str, Json]) -> None:
        step = state.get("step", 0)
        assert isinstance(step, int), f"state {dict(state)} is not a console's"
        self._last = step
        if self._live:
            progress, task = self._live
            progress.update(task, completed=step)

    def close(self) -> None:
        self._say()
        if self._live:
            self._live[0].stop()
            self._live = None
