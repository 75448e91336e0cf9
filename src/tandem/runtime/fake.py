"""A WorkerGroup for tests: one worker, and a record of what was asked of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar

from tandem.runtime.dispatch import registered

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


class FakeGroup:
    """Implements ports.WorkerGroup with a single rank. calls: (method, positional arguments), in order."""

    def __init__(self, worker: object) -> None:
        self._worker = worker
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    @property
    def size(self) -> int:
        return 1

    async def call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        name, _, _ = registered(method)
        self.calls.append((name, args))
        return await getattr(self._worker, name)(*args, **kwargs)

    async def call_each(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [await self.call(method, *args, **kwargs)]
