"""Where this process stands, for the error of a wait in which nothing moves: its threads, and its tasks where they wait."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any

_NAMES = 4  # of tasks that wait at one place
_FRAMES = 6  # of each, the innermost


def where(work: Any) -> str:
    """Each call of a coroutine and of those that it waits for, outermost first."""
    return "".join(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in _awaiting(work)).format())


def of_tasks() -> str:
    """The tasks of the running event loop but this one, those together that wait at one place; and the other threads."""
    places: dict[str, list[str]] = {}
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        work = task.get_coro()
        frames = list(_awaiting(work)) if isinstance(work, Coroutine) else []
        chain = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames[-_FRAMES:])
        places.setdefault("".join(chain.format()), []).append(task.get_name())
    parts = [
        f"{', '.join(sorted(names)[:_NAMES])}{f' and {len(names) - _NAMES} more' if len(names) > _NAMES else ''}:\n{place}"
        for place, names in sorted(places.items(), key=lambda item: -len(item[1]))
    ]
    frames_of = sys._current_frames()  # pyright: ignore[reportPrivateUsage] documented, in spite of its name
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident in frames_of:
            stack = traceback.extract_stack(frames_of[thread.ident])[-_FRAMES:]
            parts.append(f"thread {thread.name}:\n{''.join(traceback.format_list(stack))}")
    return "\n".join(parts)


def _awaiting(work: Any) -> Iterator[FrameType]:
    """The frames of a coroutine or an asynchronous generator and of what it waits for, outermost first."""
    while work is not None:
        kind = next((kind for kind in ("cr", "ag", "gi") if hasattr(work, f"{kind}_frame")), None)
        if kind is None or (frame := getattr(work, f"{kind}_frame")) is None:
            return
        yield frame
        work = getattr(work, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
