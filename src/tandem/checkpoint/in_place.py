"""Without moving anything: trainer and rollout engines read the same parameters in one process.

What is left to do is to tell the engines that the weights are new, so that they drop what older ones computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tandem.checkpoint.transport import Outlet, Seen, this_host
from tandem.errors import EngineError
from tandem.weights import OpenedWeights, Room, WeightBlock, WeightPiece, WeightShard, nowhere, two_at_a_time


@dataclass(frozen=True, slots=True)
class NothingToMove:
    """Implements ports.WeightSource and transport.Reader."""

    blocks: tuple[WeightBlock, ...]
    shared: bool = True

    def source(self, number: int) -> NothingToMove:
        del number
        return self

    def shards(self, room: Room = nowhere) -> Iterator[WeightPiece]:
        del room
        return iter(())


class InPlaceSender:
    """Implements transport.Sender."""

    def __init__(self, index: int, blocks: Sequence[WeightBlock]) -> None:
        self.opened = OpenedWeights(this_host(), tuple(blocks), str(index))

    def send(self, number: int, pieces: Iterable[WeightPiece], seen: Seen) -> int:
        """The readers have it all."""
        held = [piece.tensor for piece in pieces if isinstance(piece, WeightShard)]  # all: nothing is encoded here
        two_at_a_time(lambda place: seen(place, held[place]), len(held))
        return 0

    def close(self) -> None: ...


class InPlace:
    """Implements transport.Transport for engines that share their parameters with the trainer, a worker of this process."""

    name: ClassVar[str] = "in_place"
    moves: ClassVar[bool] = False
    far: ClassVar[bool] = False
    meets: ClassVar[bool] = False

    def outlet(self, readers: int) -> Outlet:
        self._count = readers
        return InPlaceSender

    def readers(self, opened: Sequence[OpenedWeights]) -> Sequence[NothingToMove]:
        """Raises EngineError where the trainer cuts its weights."""
        if len(opened) != 1:
            raise EngineError(f"{len(opened)} ranks hold the weights; publishing in place needs one, in this process")
        for block in opened[0].blocks:
            if block.size != block.shape:
                raise EngineError(
                    f"weight {block.name} is cut: a block {block.size} of {block.shape}; "
                    "publishing in place needs whole weights in one process"
                )
        return [NothingToMove(opened[0].blocks)] * self._count

    def close(self) -> None: ...
