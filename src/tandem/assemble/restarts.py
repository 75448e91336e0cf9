"""When a run goes on by itself: a worker's process died, and a step or a snapshot was new since the run did so last.

How it goes on is the business of `--resume`: everything is built again, and the last whole snapshot is restored. What else ends a
run (bad input, NaN, a full disk, a wait without progress) would end it again, and is nobody's death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from rich.console import Console

from tandem.checkpoint.snapshots import SnapshotStore


class Mortal(Protocol):
    """As much of a phase's workers as is needed here. death: which of their processes died, and how, if one did."""

    @property
    def death(self) -> str: ...
    def tell(self, tell: Callable[[str], None]) -> None: ...


class Restarts:
    """most: times in a row without anything new between. total: of the run; of those in earlier processes, what snapshots know."""

    def __init__(self, most: int, console: Console) -> None:
        self.total = 0
        self._most, self._console = most, console
        self._in_vain = 0
        self._furthest: dict[str, int] = {}
        self._running: tuple[str, SnapshotStore, Mortal] | None = None
        self._unlogged = ""  # the phase of the last one

    def watch(self, phase: str, store: SnapshotStore, workers: Mortal) -> None:
        """From now on this phase runs, with these workers; deaths that it goes on without are said."""
        self._running = phase, store, workers
        workers.tell(self._warn)

    def reached(self, what: str, step: int) -> None:
        """What goes on is no circle where this is new."""
        if step > self._furthest.get(what, -1):
            self._furthest[what] = step
            self._in_vain = 0

    def go_on(self) -> bool:
        """After an error: whether the run goes on by itself, which is said, with who died."""
        task, running, self._running = asyncio.current_task(), self._running, None
        if running is None or (task is not None and task.cancelling()):
            return False
        phase, store, workers = running
        if not (death := workers.death):
            return False
        if self._in_vain >= self._most:
            if self._in_vain:
                self._warn(f"{phase} came no further since restart {self.total}, and does not go on by itself again")
            return False
        self._in_vain += 1
        self.total += 1
        self._unlogged = phase
        where = f"step {store.steps[0]}" if store.steps else "its beginning"
        self._warn(f"{phase} goes on by itself from {where} (restart {self.total}): {death}")
        return True

    def logged(self, phase: str) -> bool:
        """Whether one of this phase is to be logged; once for each."""
        if self._unlogged != phase:
            return False
        self._unlogged = ""
        return True

    def _warn(self, what: str) -> None:
        self._console.print(f"warning: {what}", style="yellow", markup=False, highlight=False, soft_wrap=True)
