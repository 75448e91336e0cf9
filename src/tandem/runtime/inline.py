"""The runtime of one process: ranks are objects, and a call is a call. Nothing is copied or pickled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from tandem.errors import RunError
from tandem.ports import Dispatch
from tandem.runtime.dispatch import Call, gather, keys_of, registered, scatter

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


class InlineGroup:
    """Implements ports.WorkerGroup over live workers, one a rank; methods are found by name on the live worker."""

    def __init__(self, workers: Sequence[object]) -> None:
        if not workers:
            raise RunError("a group has at least one worker")
        self._workers = tuple(workers)

    @property
    def size(self) -> int:
        return len(self._workers)

    async def call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        name, dispatch, collect = registered(method)
        match dispatch:
            case Dispatch.RANK_ZERO:
                return await self._on(self._workers[0], name, (args, kwargs))
            case Dispatch.BROADCAST:
                calls: list[Call] = [(args, kwargs)] * self.size
            case Dispatch.SPLIT:
                calls = [(args, kwargs)] if self.size == 1 else scatter(args, kwargs, self.size)
        return gather(await self._all(name, calls), collect, keys_of(args, kwargs) if dispatch is Dispatch.SPLIT else None)

    async def call_each(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return await self._all(registered(method)[0], [(args, kwargs)] * self.size)

    async def _all(self, name: str, calls: Sequence[Call]) -> list[Any]:
        return await asyncio.gather(*(self._on(worker, name, call) for worker, call in zip(self._workers, calls, strict=True)))

    @staticmethod
    async def _on(worker: object, name: str, call: Call) -> Any:
        args, kwargs = call
        return await getattr(worker, name)(*args, **kwargs)
