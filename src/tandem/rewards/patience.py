"""Waiting for what another process does, with a limit that a busy event loop does not use up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_SLICES = 10


async def within(limit_s: float, waited: Coroutine[Any, Any, T]) -> T:
    """The result of `waited`. Raises TimeoutError, with `waited` cancelled, where there is none after `limit_s`.

    Waits in slices, so that a loop that is busy with something else, as in a training step, uses up one of them and not all.
    """
    task = asyncio.ensure_future(waited)
    try:
        for _ in range(_SLICES):
            if (await asyncio.wait({task}, timeout=limit_s / _SLICES))[0]:
                return task.result()
        raise TimeoutError
    finally:
        if task.cancel():
            await asyncio.wait({task})
