"""Ctrl-C: once, and a run ends in order; twice, and it leaves at once, which a run stands as it stands a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from itertools import count
from types import FrameType
from typing import Any, cast

from rich.console import Console


def complete(work: Coroutine[Any, Any, None], console: Console) -> None:
    """asyncio.run, with such a Ctrl-C. Raises what the work does, and KeyboardInterrupt."""

    async def interruptible() -> None:
        in_order = signal.getsignal(signal.SIGINT)  # asyncio's, where this is the main thread; it cancels the work
        interrupts = count()

        def interrupted(number: int, frame: FrameType | None) -> None:
            if next(interrupts):
                console.show_cursor()
                os.write(2, b"\nleft at once\n")
                os._exit(130)
            cast("Callable[[int, FrameType | None], None]", in_order)(number, frame)

        if in_order in (signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL, None):
            return await work
        signal.signal(signal.SIGINT, interrupted)
        try:
            return await work
        finally:
            signal.signal(signal.SIGINT, in_order)

    asyncio.run(interruptible())
