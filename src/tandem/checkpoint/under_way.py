"""The snapshot that a run writes while it goes on: one at most, since a queue commits its last save, and none is forgotten.

What is in it and how it is written is snapshots.py's business; when one is due, its owner's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from tandem import stacks
from tandem.checkpoint.snapshots import SnapshotStore
from tandem.errors import StalledError, TandemError


class UnderWay:
    """For the length of an `async with`, which ends when nothing is being written.

    limit_s: how long to wait while nothing of it is written. warn: told what became of a snapshot where the run ends with an error
    of its own, which is raised.
    """

    def __init__(self, store: SnapshotStore, limit_s: float, warn: Callable[[str], None]) -> None:
        self._store, self._limit_s, self._warn = store, limit_s, warn
        self._task: asyncio.Task[None] | None = None

    def start(self, step: int, work: Coroutine[Any, Any, None]) -> None:
        """`work` makes it whole, and does what comes after that."""
        assert self._task is None, "one at a time"
        self._task = asyncio.create_task(work, name=f"the snapshot of step {step}")

    def look(self) -> None:
        """Raises what went wrong with it, if that is known already."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def ended(self) -> None:
        """Until it is whole, if there is one. Raises what went wrong with it; StalledError where nothing is written any more."""
        task, self._task = self._task, None
        if task is None:
            return
        before = -1
        while not (await asyncio.wait([task], timeout=self._limit_s))[0]:
            before, last = self._store.written_bytes(), before
            if before == last:
                raise StalledError(
                    f"{task.get_name()} is not whole, and nothing was written for {self._limit_s:g} s, after {before} bytes: look "
                    f"at the disk of {self._store.directory}, or raise runtime.limit_s. "
                    f"Where this process stands:\n{stacks.of_tasks()}"
                )
        task.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        name = self._task.get_name() if self._task is not None else ""
        try:
            await self.ended()
        except TandemError as problem:
            if error is None or problem is error:
                raise
            self._warn(f"{name} is not there: {problem}")
