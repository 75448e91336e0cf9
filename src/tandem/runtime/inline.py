"""The runtime of one process: ranks are objects, and a call is a call. Nothing is copied or pickled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

from tandem.registry import resolve
from tandem.runtime.dispatch import Call
from tandem.runtime.group import Group
from tandem.runtime.placement import Rank


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


class InlineGroup(Group):
    """Implements ports.WorkerGroup over live workers, one a rank; methods are found by name on the live worker.

    replicas: how many neighbours share their rows.
    """

    def __init__(self, workers: Sequence[object], *, replicas: int = 1) -> None:
        self._workers = tuple(workers)
        super().__init__(len(self._workers), replicas)

    async def _all(self, method: str, calls: Sequence[Call]) -> list[Any]:
        return await asyncio.gather(*(self._on(worker, method, call) for worker, call in zip(self._workers, calls, strict=False)))

    @staticmethod
    async def _on(worker: object, method: str, call: Call) -> Any:
        args, kwargs = call
        return await getattr(worker, method)(*args, **kwargs)
