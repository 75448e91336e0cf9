"""Weights large enough to go from where they lie to where they are to be, beside small ones and such that have to be cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tandem import device
from tandem.checkpoint.collective import Collective, CollectiveReader, CollectiveSender
from tandem.checkpoint.encoding import Delta, Encoding, Full
from tandem.rollout.weights import room, scatter
from tandem.weights import BlockHash, Room, WeightBlock, nowhere

BUCKET_BYTES, LIMIT_S = 1 << 20, 20.0
LARGE, SMALL = (700, 512), (3, 5)  # 700 KB in bfloat16; in float32 cut, and both parts are large

Weights = dict[str, Tensor]


def weights(seed: int) -> Weights:
    """Of which "master" is sent in bfloat16."""
    random = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(LARGE, generator=random) for name in ("first", "master", "wide")}
    made |= {name: torch.randn(SMALL, generator=random) for name in ("small", "other")}
    return {name: tensor if name in ("master", "wide") else tensor.bfloat16() for name, tensor in made.items()}


def blocks_of(held: Weights) -> list[WeightBlock]:
    wire = {name: torch.bfloat16 if name == "master" else tensor.dtype for name, tensor in held.items()}
    return [WeightBlock(name, tuple(each.shape), (0, 0), tuple(each.shape), wire[name]) for name, each in held.items()]


@contextmanager
def connected(blocks: Sequence[WeightBlock], readers: int) -> Iterator[tuple[CollectiveSender, Sequence[CollectiveReader]]]:
    transport = Collective("127.0.0.1", device.select("cpu"), BUCKET_BYTES, LIMIT_S)
    try:
        sender = transport.outlet(readers)(0, blocks)
        assert isinstance(sender, CollectiveSender)
        yield sender, transport.readers([sender.opened])
    finally:
        transport.close()


def published(
    sender: CollectiveSender,
    readers: Sequence[CollectiveReader],
    encoding: Encoding,
    held: Weights,
    into: Sequence[tuple[Weights, Room]],
) -> list[list[str]]:
    """To all of them; the names of the pieces that each was given."""

    def read(reader: CollectiveReader, there: Mapping[str, Tensor], where: Room) -> list[str]:
        names = list[str]()
        for piece in reader.source(1).shards(where):
            scatter(piece, there[piece.block.name])
            names.append(piece.block.name)
        return names

    with ThreadPoolExecutor(len(readers)) as pool:
        coming = [pool.submit(read, reader, *each) for reader, each in zip(readers, into, strict=True)]
        pieces = [encoding.encode(block, held[block.name], False, BlockHash(block)) for block in sender.opened.blocks]
        sender.send(1, pieces, lambda _place, _part: None)
        return [each.result(LIMIT_S) for each in coming]


@pytest.mark.parametrize("encoding", [Full(), Delta()])
def test_every_reader_has_the_bits_wherever_it_keeps_them(encoding: Encoding) -> None:
    held = weights(0)
    blocks = blocks_of(held)
    straight = {block.name: torch.zeros(block.size, dtype=block.dtype) for block in blocks}
    apart = {name: tensor.clone() for name, tensor in straight.items()}
    crosswise = {name: torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t() for name, tensor in straight.items()}
    doubled = {name: tensor.double() for name, tensor in straight.items()}
    into = [(straight, room(straight)), (crosswise, room(crosswise)), (apart, nowhere), (doubled, room(doubled))]
    with connected(blocks, len(into)) as (sender, readers):
        for seed in (1, 2):
            for name, tensor in weights(seed).items():
                held[name].view(-1)[seed::9] = tensor.view(-1)[seed::9]
            given = published(sender, readers, encoding, held, into)
            for there, _ in into:
                for block in blocks:
                    assert torch.equal(there[block.name].to(block.dtype), held[block.name].to(block.dtype))
            if isinstance(encoding, Full) or seed == 1:
                assert set(given[0]) == {"small", "other"}, "the others were written where they are to be"
            assert given[1] == given[2] == given[3]
            assert set(given[2]) == set(held)


def test_what_lies_in_no_order_or_on_its_way_to_another_dtype_is_laid_out_first() -> None:
    held = {name: tensor.t().contiguous().t() for name, tensor in weights(0).items()}
    blocks = blocks_of(held)
    there = {block.name: torch.zeros(block.size, dtype=block.dtype) for block in blocks}
    with connected(blocks, 1) as (sender, readers):
        published(sender, readers, Full(), held, [(there, room(there))])
    assert all(torch.equal(there[block.name], held[block.name].to(block.dtype)) for block in blocks)
