"""How the bytes of weights move: what a way of moving them is made of, at its three places.

    Transport   the controller's: makes outlets and readers
    Outlet      travels to the ranks of the trainer, and makes a Sender there
    Reader      of a rollout engine; gives a WeightSource for each publish, which may travel to where the engine is

Publishes are numbered by the controller. Which numbers an engine may use is the engine's affair; whose bits they are is checked
by whoever publishes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from tandem.ports import WeightSource
from tandem.weights import OpenedWeights, WeightBlock, WeightPiece

Seen = Callable[[int, Tensor], None]
"""Is given the place of a piece and the numbers of it that were just read, while they lie in a cache: for each shard all of them,
part by part in order. In any thread."""


class Sender(Protocol):
    """Of a rank of the trainer, in its process. Calls block."""

    opened: OpenedWeights

    def send(self, number: int, pieces: Iterable[WeightPiece], seen: Seen) -> int:
        """Bytes. One piece a block, in order, made when it is asked for; a shard is cast to the dtype of its block
        on its way.
        """
        ...

    def close(self) -> None: ...


Outlet = Callable[[int, Sequence[WeightBlock]], Sender]
"""Makes a rank's sender in its process: from its index among those that send, and what it will send, in the dtype of the wire."""


class Reader(Protocol):
    """Of a rollout engine."""

    def source(self, number: int) -> WeightSource:
        """Picklable; opened where it is first looked at. Those of one reader share what they have in a process."""
        ...


class Transport(Protocol):
    """moves: there is storage of its own on the other side. far: a link may lie between, so that to send less may be faster, which
    within one machine it was never measured to be. meets: a sender writes while all readers read, so that a reader that
    does not is noticed by all; else what was written stays until the publish after the next.
    """

    name: ClassVar[str]
    moves: ClassVar[bool]
    far: ClassVar[bool]
    meets: ClassVar[bool]

    def outlet(self, readers: int) -> Outlet:
        """Picklable. For so many readers; those of an earlier outlet are read from no more where senders and readers meet."""
        ...

    def readers(self, opened: Sequence[OpenedWeights]) -> Sequence[Reader]:
        """Of the outlet made last, opened by each rank. Raises EngineError for senders that cannot be read from here."""
        ...

    def close(self) -> None: ...


def this_host() -> str:
    """The same for processes of one machine that see each other."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
