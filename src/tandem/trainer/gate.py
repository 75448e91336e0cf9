"""Admission: how many groups may be under way. Arithmetic and one wait; it knows neither tasks nor engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tandem.types import Json


class Gate:
    """Admits while admitted - returned < (finished + k + 1) * groups_per_step + spare; schedule.py proves what follows from it.

    finished: policy versions made since `first_version`. A group that is dropped gives its slot back. A gate
    that was closed stays so until `advance`, whatever is given back.
    """

    def __init__(self, groups_per_step: int, staleness: int, first_version: int = 0, *, spare: int = 0) -> None:
        if groups_per_step < 1 or staleness < 0 or spare < 0:
            raise ValueError(
                f"a gate needs groups_per_step >= 1, staleness >= 0 and spare >= 0, got {groups_per_step}, {staleness} and {spare}"
            )
        self._groups_per_step = groups_per_step
        self._staleness = staleness
        self._spare = spare
        self._closed = False
        self._first_version = first_version
        self._finished = 0
        self._admitted = 0
        self._returned = 0
        self._moved = asyncio.Event()

    @property
    def is_open(self) -> bool:
        in_flight = (self._finished + self._staleness + 1) * self._groups_per_step + self._spare
        return not self._closed and self._admitted - self._returned < in_flight

    async def opened(self) -> None:
        """Waits, without a limit of its own, for `give_back` or `advance`: what is waited for there has one."""
        while not self.is_open:
            self._moved.clear()
            await self._moved.wait()

    def admit(self) -> None:
        assert self.is_open, "a group was admitted through a closed gate"
        self._admitted += 1

    def give_back(self) -> None:
        """An admitted group was dropped and will not be consumed."""
        self._returned += 1
        assert self._returned <= self._admitted, "more groups were returned than admitted"
        self._moved.set()

    def close(self) -> None:
        self._closed = True

    def advance(self, version: int) -> None:
        """The policy is at `version` now."""
        self._closed = False
        self._finished = version - self._first_version
        self._moved.set()

    def state(self) -> dict[str, Json]:
        return {"first_version": self._first_version, "admitted": self._admitted, "returned": self._returned}

    def restore(self, state: Mapping[str, Json], version: int) -> None:
        first, admitted, returned = state["first_version"], state["admitted"], state["returned"]
        assert isinstance(first, int)
        assert isinstance(admitted, int)
        assert isinstance(returned, int)
        self._first_version, self._admitted, self._returned = first, admitted, returned
        self.advance(version)
