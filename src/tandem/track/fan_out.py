"""Several trackers as one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import cast

from tandem.ports import Tracker
from tandem.types import Json, Metrics


class Trackers:
    """Implements ports.Tracker by telling each of its members, in order, and keeping their states by name.

    A member that the restored state does not know (it was added to the recipe since) starts at the beginning.
    """

    def __init__(self, members: Mapping[str, Tracker]) -> None:
        self._members = dict(members)

    def log(self, metrics: Metrics, step: int) -> None:
        for member in self._members.values():
            member.log(metrics, step)

    def state(self) -> dict[str, Json]:
        return {name: member.state() for name, member in self._members.items()}

    def restore(self, state: Mapping[str, Json]) -> None:
        for name, member in self._members.items():
            member.restore(cast("dict[str, Json]", state.get(name, {})))

    def close(self) -> None:
        """Closes every member, also where closing one fails."""
        with ExitStack() as stack:
            for member in reversed(self._members.values()):
                stack.callback(member.close)
