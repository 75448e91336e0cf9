"""A rank hashes what it holds while its bytes are on their way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem.checkpoint import rank
from tandem.checkpoint.fake import FakeWeightWorker
from tandem.checkpoint.rank import RankWeights
from tandem.checkpoint.transport import Sender
from tandem.errors import EngineError
from tandem.weights import OpenedWeights, WeightBlock, WeightPiece, WireHash, wire_hash


class Held(Sender):
    """Says that it began to send, and ends when it is told to."""

    def __init__(self, index: int, blocks: Sequence[WeightBlock]) -> None:
        self.opened = OpenedWeights("here", tuple(blocks), str(index))

    def send(self, number: int, pieces: Sequence[WeightPiece]) -> int:
        del pieces
        sending.set()
        if not hashing.wait(10):
            raise EngineError("nothing is hashed while weights are sent")
        return number

    def close(self) -> None: ...


sending, hashing = threading.Event(), threading.Event()


class Watched(WireHash):
    def add(self, block: WeightBlock, tensor: Tensor) -> None:
        if not sending.wait(10):
            raise EngineError("nothing is sent while weights are hashed")
        hashing.set()
        super().add(block, tensor)


def test_the_hash_is_taken_while_the_bytes_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "WireHash", Watched)
    worker = FakeWeightWorker({"a": torch.arange(6.0), "b": torch.ones(2, 2)})
    weights = RankWeights(worker)
    weights.open(Held)
    sent = asyncio.run(weights.send(7, delta=False, whole=True))
    assert sent is not None
    assert (sent.wire_hash, sent.num_bytes, sent.numbers, sent.sent) == (wire_hash(worker.weight_shards()), 7, 10, 10)


def test_weights_in_another_order_than_they_were_opened_in_are_refused() -> None:
    worker = FakeWeightWorker({"a": torch.ones(2), "b": torch.ones(2)})
    weights = RankWeights(worker)
    weights.open(Held)
    worker.held = dict(reversed(worker.held.items()))
    with pytest.raises(EngineError, match="weight b stands where a was as the weights were opened: open them again"):
        asyncio.run(weights.send(1, delta=False, whole=True))
