"""A delta is what changed, bit by bit, and nothing else; applied in any cut it gives the same bits as everything would."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.checkpoint.encoding import Delta
from tandem.checkpoint.packing import entry_of, read, write
from tandem.rollout.weights import scatter
from tandem.weights import AT_ONCE, BlockHash, WeightBlock, WeightPatch, WeightPiece, WeightShard, block_hash


def block_of(tensor: Tensor) -> WeightBlock:
    return WeightShard("w", tuple(tensor.shape), (0,) * tensor.ndim, tensor).block


def patch(before: Tensor, after: Tensor) -> WeightPatch:
    delta = Delta()
    encoded(delta, before, whole=True)
    found = encoded(delta, after)
    assert isinstance(found, WeightPatch)
    return found


def told(found: WeightPatch) -> dict[int, int]:
    """Each byte's place in the block, and what it is now."""
    width = found.block.dtype.itemsize
    planes = enumerate(found.planes())
    return {
        int(number) * width + byte: int(value)
        for byte, (numbers, values) in planes
        for number, value in zip(numbers, values, strict=True)
    }


def encoded(delta: Delta, tensor: Tensor, *, whole: bool = False) -> WeightPiece:
    """As `delta` sends it; it is hashed on the way."""
    block = block_of(tensor)
    growing = BlockHash(block)
    piece = delta.encode(block, tensor.clone(), whole, growing)
    assert growing.digest() == block_hash(block, tensor)
    return piece


@settings(deadline=None, max_examples=40)
@given(
    shape=st.sampled_from([(), (1,), (7,), (5, 3), (4, 2, 3), (64, 33)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 1000),
    share=st.floats(0, 1),
)
def test_scattered_into_any_block_it_gives_what_is_there(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, share: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    before = torch.randn(shape, generator=random).to(dtype)
    after = torch.where(torch.rand(shape, generator=random) < share, -before, before)
    delta = Delta()
    encoded(delta, before, whole=True)
    piece = encoded(delta, after)
    entry = entry_of(piece, block_of(before))
    memory = torch.empty(entry.size, dtype=torch.uint8)
    arrived = read(entry, memory)
    write(piece, arrived, lambda _: None)
    whole = before.clone()
    scatter(arrived, whole)
    assert torch.equal(whole, after)
    scatter(arrived, whole)
    assert torch.equal(whole, after), "delivered twice"
    wider = before.double()
    scatter(arrived, wider)
    assert torch.equal(wider, after.double())
    if shape:
        middle = shape[0] // 2
        for start, end in ((0, middle), (middle, shape[0])):
            mine = before[start:end].clone()
            scatter(arrived, mine, (start, *(0,) * (len(shape) - 1)))
            assert torch.equal(mine, after[start:end])


def test_bits_are_compared_and_not_numbers() -> None:
    before = torch.tensor([0.0, float("nan"), 1.0, 2.0] * 8)
    after = before.clone()
    after[0] = -0.0
    found = patch(before, after)
    assert told(found)[3] == 0x80, "the first byte of the first number, which lies last"


@pytest.mark.parametrize("places", [[0], [255], [256], [257], [511, 512], [3, 200_000], [199_999, 299_999], [131_072, 262_144]])
def test_far_changes_are_bridged_by_bytes_that_did_not_change(places: list[int]) -> None:
    before = torch.zeros(300_000)
    after = before.clone()
    after[places] = 1  # 0x3f80: two bytes of the four
    found = patch(before, after)
    assert {4 * place + byte for place in places for byte in (2, 3)} <= set(told(found))
    assert found.gaps.min() >= 1
    assert len(found.values) <= 3 * len(places) + 2 * len(before) // 255 + 8, "and first and last of each plane"
    assert sorted(found.values[found.values != 0].tolist()) == sorted([0x80, 0x3F] * len(places))
    scatter(found, before)
    assert torch.equal(before, after)


def test_of_a_small_step_in_bfloat16_two_bytes_a_number_are_sent() -> None:
    before = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)).bfloat16() + 1
    after = before.clone()
    after[::8] += 2**-7  # the least difference there is between 1 and 2
    assert patch(before, after).nbytes <= 2 * (1 << 13) + 2 * before.nbytes // 256


@pytest.mark.parametrize("share", [0, 1e-4, 0.02, 0.13, 0.6])
def test_blocks_of_many_parts_come_out_bit_for_bit(share: float) -> None:
    random = torch.Generator().manual_seed(3)
    before = torch.randn(2 * AT_ONCE + 77, generator=random).bfloat16()
    bits = before.view(torch.int16).clone()
    changed = torch.rand(len(bits), generator=random) < share
    bits[changed] ^= torch.randint(1, 1 << 15, (int(changed.sum()),), generator=random).to(torch.int16)
    delta = Delta()
    encoded(delta, before, whole=True)
    piece = encoded(delta, bits.view(torch.bfloat16))
    assert isinstance(piece, WeightPatch) == (share < 0.6)
    scatter(piece, before)
    assert torch.equal(before.view(torch.int16), bits)
    if isinstance(piece, WeightPatch):
        (numbers, _), (others, _) = piece.planes()
        assert set(others.tolist()) <= set(numbers.tolist())
        assert bool(len(numbers)) == bool(share)


def test_no_more_is_held_than_what_is_told_once_in_parts_and_once_together() -> None:
    """And what one part takes, for each of its numbers: an index for each of two planes, and bits, bytes and marks."""
    before = torch.zeros(16 * AT_ONCE, dtype=torch.bfloat16)
    after = (before.view(torch.int16) + 0x0101).view(torch.bfloat16)
    delta = Delta()
    encoded(delta, before, whole=True)
    block = block_of(after)
    tracemalloc.start()
    delta.encode(block, after, False, BlockHash(block))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    told_bytes = 2 * 2 * len(after)  # a gap and a value for both bytes of each number
    assert peak <= 2 * told_bytes + 32 * AT_ONCE


def test_what_would_take_more_room_goes_whole_and_is_the_base_of_the_next() -> None:
    before, delta = torch.zeros(64), Delta()
    encoded(delta, before)
    assert isinstance(encoded(delta, torch.ones(64)), WeightShard)
    assert len(encoded(delta, torch.ones(64)).values) == 0  # type: ignore[union-attr]
    assert isinstance(encoded(delta, torch.ones(64), whole=True), WeightShard)


def test_the_trainers_tensor_is_not_kept() -> None:
    held, delta = torch.zeros(64), Delta()
    delta.encode(block_of(held), held, False, BlockHash(block_of(held)))
    held[5] = 1
    delta.encode(block_of(held), held, False, BlockHash(block_of(held)))
    held[6] = 1
    found = delta.encode(block_of(held), held, False, BlockHash(block_of(held)))
    assert isinstance(found, WeightPatch)
    assert {place // 4 for place in told(found)} == {0, 6, 63}, "and the first and the last"
