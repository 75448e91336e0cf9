"""A rank hashes what it holds as its sender has read it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest
import torch

from tandem.checkpoint.fake import FakeWeightWorker
from tandem.checkpoint.rank import RankWeights
from tandem.checkpoint.transport import Seen, Sender
from tandem.errors import EngineError
from tandem.weights import OpenedWeights, WeightBlock, WeightPiece, WeightShard, wire_hash


class Backwards(Sender):
    """Reads the last piece first, and destroys what it has read and said so."""

    def __init__(self, index: int, blocks: Sequence[WeightBlock]) -> None:
        self.opened = OpenedWeights("here", tuple(blocks), str(index))

    def send(self, number: int, pieces: Iterable[WeightPiece], seen: Seen) -> int:
        for place, piece in reversed(list(enumerate(pieces))):
            assert isinstance(piece, WeightShard)
            seen(place, piece.tensor)
            piece.tensor.zero_()
        return number

    def close(self) -> None: ...


def test_each_block_is_hashed_when_it_was_read_in_whatever_order() -> None:
    worker = FakeWeightWorker({"a": torch.arange(6.0), "b": torch.ones(2, 2)})
    expected = wire_hash(worker.weight_shards())
    weights = RankWeights(worker)
    weights.open(Backwards)
    sent = asyncio.run(weights.send(7, delta=False, whole=True))
    assert sent is not None
    assert (sent.wire_hash, sent.num_bytes, sent.whole_bytes) == (expected, 7, 40)
    assert expected != wire_hash(worker.weight_shards())


def test_weights_in_another_order_than_they_were_opened_in_are_refused() -> None:
    worker = FakeWeightWorker({"a": torch.ones(2), "b": torch.ones(2)})
    weights = RankWeights(worker)
    weights.open(Backwards)
    worker.held = dict(reversed(worker.held.items()))
    with pytest.raises(EngineError, match="weight b stands where a was as the weights were opened: open them again"):
        asyncio.run(weights.send(1, delta=False, whole=True))
