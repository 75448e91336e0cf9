"""What changed does not wait in a bucket for many other weights to be compared."""

from __future__ import annotations

import torch

from tandem.checkpoint.packing import buckets
from tandem.weights import WeightBlock, WeightPatch, WeightPiece, WeightShard


def block(name: str, numbers: int) -> WeightBlock:
    return WeightBlock(name, (numbers,), (0,), (numbers,), torch.bfloat16)


def patch(of: WeightBlock, changes: int) -> WeightPatch:
    return WeightPatch(of, torch.ones(changes, dtype=torch.uint8), torch.zeros(changes, dtype=torch.uint8))


def test_a_bucket_stands_for_so_many_bytes_of_weights_however_few_changed() -> None:
    blocks = [block(str(i), 50) for i in range(5)]
    pieces: list[WeightPiece] = [patch(of, 1) for of in blocks]
    found = [[part.entry.changes for part in bucket] for bucket in buckets(pieces, blocks, 200)]
    assert found == [[1, 1], [1, 1], [1]]


def test_only_shards_are_cut() -> None:
    blocks = [block("a", 300), block("b", 300)]
    pieces = [patch(blocks[0], 7), WeightShard.of(blocks[1], torch.zeros(300))]
    found = [[(part.place, part.entry.size) for part in bucket] for bucket in buckets(pieces, blocks, 200)]
    assert found == [[(0, 14)], [(1, 200)], [(1, 200)], [(1, 200)]]
