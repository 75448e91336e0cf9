"""The calls of a ports.WorkerGroup, which are the same on every runtime; what reaches the ranks is the runtime's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from tandem.runtime.dispatch import Call, checked, gather, registered, scatter

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


class Group(ABC):
    """Implements ports.WorkerGroup. replicas: how many neighbours share their rows."""

    def __init__(self, size: int, replicas: int) -> None:
        self.size = size
        self._replicas = checked(size, replicas)

    async def call(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        name, dispatch, collect = registered(method)
        results = await self._all(name, scatter(dispatch, args, kwargs, self.size, self._replicas))
        return gather(results, dispatch, collect, self._replicas, (args, kwargs))

    async def call_each(self, method: Callable[Concatenate[W, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return await self._all(registered(method)[0], [(args, kwargs)] * self.size)

    @abstractmethod
    async def _all(self, method: str, calls: Sequence[Call]) -> list[Any]:
        """What each of the first ranks answers, as many as there are calls."""
