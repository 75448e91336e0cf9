"""A rank's part in a publish: what it holds, encoded and sent, with its hash."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from tandem.checkpoint.encoding import Delta, Encoding, Full
from tandem.checkpoint.transport import Outlet, Sender
from tandem.errors import EngineError
from tandem.weights import (
    BlockHash,
    OpenedWeights,
    SentWeights,
    WeightBlock,
    WeightLayout,
    WeightPiece,
    WeightShard,
    ahead,
    joined_hash,
)


class Holder(Protocol):
    """As much of a TrainEngine as is needed here."""

    def layout(self) -> WeightLayout: ...
    def weight_shards(self) -> Iterator[WeightShard]: ...


class RankWeights:
    """See ports.WeightWorker. What blocks runs in a thread; the weights must not change meanwhile."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._sender: Sender | None = None
        self._encoding: Encoding = Full()
        self._blocks: tuple[WeightBlock, ...] = ()

    def open(self, outlet: Outlet) -> OpenedWeights | None:
        self.close()
        layout = self._holder.layout()
        if layout.replica != 0:
            return None
        wire = {spec.name: spec.wire for spec in layout.specs}
        blocks = (shard.block for shard in self._holder.weight_shards())
        self._blocks = tuple(
            WeightBlock(block.name, block.shape, block.offsets, block.size, wire[block.name] or block.dtype) for block in blocks
        )
        self._sender = outlet(layout.index, self._blocks)
        return self._sender.opened

    async def send(self, number: int, *, delta: bool, whole: bool) -> SentWeights | None:
        """delta: only what changed since the last one, unless `whole` asks for everything, or there was none."""
        if self._sender is None:
            return None
        if delta != isinstance(self._encoding, Delta):
            self._encoding = Delta() if delta else Full()
        return await asyncio.to_thread(self._send, self._sender, number, self._encoding, whole)

    def _send(self, sender: Sender, number: int, encoding: Encoding, whole: bool) -> SentWeights:
        held = list(self._held())
        hashes = [BlockHash(block) for block in self._blocks]

        def encode(place: int) -> WeightPiece:
            return encoding.encode(*held[place], whole, hashes[place])

        def seen(place: int, part: Tensor) -> None:
            if not encoding.hashes:
                hashes[place].update(part)

        pieces = ahead(encode, len(held)) if encoding.hashes else map(encode, range(len(held)))
        moved = sender.send(number, pieces, seen)
        whole_bytes = sum(block.nbytes for block in self._blocks)
        return SentWeights(joined_hash(each.digest() for each in hashes), moved, whole_bytes)

    def _held(self) -> Iterator[tuple[WeightBlock, Tensor]]:
        """Each block with the tensor that is held of it, in the trainer's dtype."""
        for block, shard in zip(self._blocks, self._holder.weight_shards(), strict=True):
            if (shard.name, shard.offsets) != (block.name, block.offsets):
                raise EngineError(f"weight {shard.name} stands where {block.name} was as the weights were opened: open them again")
            yield block, shard.tensor

    def close(self) -> None:
        """Also what is kept of what was sent before is let go."""
        if self._sender is not None:
            self._sender.close()
        self._sender, self._encoding = None, Full()
