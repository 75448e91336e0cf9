"""The one hash of a set of weights, and patches."""

from __future__ import annotations

import threading

import pytest
import torch

from tandem.weights import WeightBlock, WeightShard, block_hash, joined_hash, two_at_a_time, wire_hash


def test_wire_hash_sees_every_difference_and_nothing_else() -> None:
    base = WeightShard("w", (4, 2), (0, 0), torch.arange(8.0).reshape(4, 2))
    flipped = base.tensor.clone()
    flipped.view(torch.int32)[3, 1] ^= 1
    others = [
        WeightShard("v", base.shape, base.offsets, base.tensor),
        WeightShard("w", (8, 2), base.offsets, base.tensor),
        WeightShard("w", base.shape, (4, 0), base.tensor),
        WeightShard("w", base.shape, base.offsets, base.tensor.reshape(2, 4)),
        WeightShard("w", base.shape, base.offsets, base.tensor.view(torch.int32)),
        WeightShard("w", base.shape, base.offsets, flipped),
        WeightShard("w", base.shape, base.offsets, torch.empty(0, 2)),
    ]
    hashes = {wire_hash([shard]) for shard in [base, *others]}
    assert len(hashes) == 1 + len(others)
    strided = WeightShard("w", base.shape, base.offsets, base.tensor.T.contiguous().T.requires_grad_())
    assert wire_hash([strided]) == wire_hash([base])
    assert wire_hash([base, others[0]]) != wire_hash([others[0], base])


def test_wire_hash_of_a_cast_is_that_of_what_is_sent() -> None:
    master = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0))
    cast = WeightShard("w", (1 << 19,), (0,), master.bfloat16())
    assert joined_hash([block_hash(cast.block, master)]) == wire_hash([cast])
    other = WeightBlock("w", (1 << 19,), (0,), (1 << 19,), torch.float16)
    assert block_hash(other, master) != block_hash(cast.block, master)


def test_the_numbers_of_a_block_may_lie_apart() -> None:
    """A column of a weight is a row of numbers with others between them."""
    column = torch.arange(12.0).view(4, 3)[:, 1:2]
    block = WeightBlock("w", (4, 3), (0, 1), (4, 1), torch.float32)
    assert block_hash(block, column) == block_hash(block, column.clone(memory_format=torch.contiguous_format))


@pytest.mark.parametrize("fails", [None, *range(6)])
def test_two_at_a_time_does_each_once_in_any_thread_and_raises_what_one_raised(fails: int | None) -> None:
    met = threading.Barrier(2)  # both threads are at work, whoever takes which

    def do(number: int) -> int:
        if number < 2:
            met.wait(10)
        if number == fails:
            raise ValueError(number)
        return number * number

    if fails is None:
        assert two_at_a_time(do, 6) == [0, 1, 4, 9, 16, 25]
    else:
        with pytest.raises(ValueError, match=str(fails)):
            two_at_a_time(do, 6)
