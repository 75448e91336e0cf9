"""The runtime of one process: ranks are objects, and a call is a call. Nothing is copied or pickled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from tandem.registry import resolve
from tandem.runtime.dispatch import Call, checked, gather, registered, scatter
from tandem.runtime.placement import Rank

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


class Inline:
    """The runtime of this process: one rank a group, made when it is declared; pools mean nothing."""

    def group(
        self, role: str, pool: str, factory: str, *arguments: object, replicas: int = 1, collectives: bool = False
    ) -> InlineGroup:
        """See ports.Runtime; arguments are not copied."""
        del role, pool, collectives
        make = cast("Callable[..., object]", resolve(factory, {}, kind="worker"))
        return InlineGroup([make(Rank(0, 1, replicas), *arguments)], replicas=replicas)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing was started."""


class InlineGroup:
    """Implements ports.WorkerGroup over live workers, one a rank; methods are found by name on the live worker.

    replicas: how many neighbours share their rows.
    """

    def __init__(self, workers: Sequence[object], *, replicas: int = 1) -> None:
        self._workers = tuple(workers)
        self._replicas = checked(self.size, replicas)

    @property
    def size(self) -> int:
        return len(self._workers)

    async def call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        name, dispatch, collect = registered(method)
        results = await self._all(name, scatter(dispatch, args, kwargs, self.size, self._replicas))
        return gather(results, dispatch, collect, self._replicas, (args, kwargs))

    async def call_each(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return await self._all(registered(method)[0], [(args, kwargs)] * self.size)

    async def _all(self, name: str, calls: Sequence[Call]) -> list[Any]:
        """Of the first ranks, as many as there are calls."""
        return await asyncio.gather(*(self._on(worker, name, call) for worker, call in zip(self._workers, calls, strict=False)))

    @staticmethod
    async def _on(worker: object, name: str, call: Call) -> Any:
        args, kwargs = call
        return await getattr(worker, name)(*args, **kwargs)
