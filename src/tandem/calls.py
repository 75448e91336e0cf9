"""How a call to a group of workers reaches its ranks, and what becomes of their answers: the mark that a worker's method bears."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Dispatch(Enum):
    """How a Worker call's batch reaches the ranks."""

    SPLIT = "split"
    BROADCAST = "broadcast"
    RANK_ZERO = "rank_zero"


class Collect(Enum):
    """How the ranks' results become one."""

    CONCAT = "concat"
    SUM = "sum"
    FIRST = "first"


def register(dispatch: Dispatch, collect: Collect, *, beside: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a Worker's method as callable through a WorkerGroup; the method itself is unchanged.

    beside: it waits for what another call began, meets no other rank, and does not keep the role's next calls waiting.
    """

    def mark(method: Callable[P, R]) -> Callable[P, R]:
        method.__tandem_call__ = (dispatch, collect)  # type: ignore[attr-defined]
        method.__tandem_beside__ = beside  # type: ignore[attr-defined]
        return method

    return mark
