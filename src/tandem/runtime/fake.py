"""A Runtime for tests and its WorkerGroup: one worker a role, and a record of what was asked of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar, cast

from tandem.registry import resolve
from tandem.runtime.dispatch import registered
from tandem.runtime.placement import Rank

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


class FakeRuntime:
    """Implements ports.Runtime. groups: by role."""

    def __init__(self) -> None:
        self.groups: dict[str, FakeGroup] = {}

    def group(
        self, role: str, pool: str, factory: str, *arguments: object, replicas: int = 1, collectives: bool = False
    ) -> FakeGroup:
        del pool, replicas, collectives
        make = cast("Callable[..., object]", resolve(factory, {}, kind="worker"))
        self.groups[role] = FakeGroup(make(Rank(0, 1), *arguments))
        return self.groups[role]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing was started."""


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
