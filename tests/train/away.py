"""Training engines that live in a worker: every call of the port goes over a wire, and what it gives comes back over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from tandem.ports import Collect, Dispatch, TrainEngine, WorkerGroup, register
from tandem.runtime.placement import Rank


class Host:
    """The worker: engines by number."""

    def __init__(self, rank: Rank) -> None:
        self._engines: dict[int, TrainEngine] = {}
        self._writes: list[Callable[[Path], None]] = []

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def make(self, number: int, factory: Callable[..., TrainEngine], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._engines[number] = factory(*args, **kwargs)

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def do(self, number: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result: Any = getattr(self._engines[number], method)(*args, **kwargs)
        return [*cast("Iterator[Any]", result)] if isinstance(result, Iterator) else result

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def snapshot(self, number: int) -> int:
        """Which of `write`'s it is."""
        self._writes.append(self._engines[number].snapshot())
        return len(self._writes) - 1

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def write(self, which: int, path: Path) -> None:
        self._writes[which](path)


class Away:
    """Implements TrainEngine: an engine of a group of one `Host`."""

    def __init__(self, runner: asyncio.Runner, group: WorkerGroup, number: int) -> None:
        self._runner, self._group, self._number = runner, group, number

    def snapshot(self) -> Callable[[Path], None]:
        which = self._runner.run(self._group.call(Host.snapshot, self._number))
        return lambda path: self._runner.run(self._group.call(Host.write, which, path))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._runner.run(self._group.call(Host.do, self._number, method, args, kwargs))


def maker(runner: asyncio.Runner, group: WorkerGroup, factory: Callable[..., TrainEngine]) -> Callable[..., TrainEngine]:
    """Makes engines in the worker as `factory` makes them here."""
    numbers = count()

    def make(*args: Any, **kwargs: Any) -> TrainEngine:
        number = next(numbers)
        runner.run(group.call(Host.make, number, factory, args, kwargs))
        return cast("TrainEngine", Away(runner, group, number))

    return make
