"""A delta is what changed, bit by bit, and nothing else; applied in any cut it gives the same bits as everything would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.checkpoint.encoding import Delta
from tandem.checkpoint.packing import Entry, entries_of, read, write
from tandem.rollout.weights import scatter
from tandem.weights import WeightBlock, WeightPatch, WeightShard


def block_of(tensor: Tensor) -> WeightBlock:
    return WeightShard("w", tuple(tensor.shape), (0,) * tensor.ndim, tensor).block


def patch(before: Tensor, after: Tensor) -> WeightPatch:
    delta = Delta()
    delta.encode(block_of(before), before.clone(), True)
    found = delta.encode(block_of(before), after, False)
    assert isinstance(found, WeightPatch)
    return found


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
    delta.encode(block_of(before), before.clone(), True)
    piece = delta.encode(block_of(before), after, False)
    ((_, entry),) = entries_of([piece], [block_of(before)])
    memory = torch.empty(entry.size, dtype=torch.uint8)
    arrived = read(entry, memory)
    write(piece, arrived)
    whole = before.clone()
    scatter(arrived, whole)
    assert torch.equal(whole, after)
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
    assert patch(before, after).positions.tolist() == [0]


@pytest.mark.parametrize("places", [[0], [65_535], [65_536], [65_537], [3, 200_000], [199_999, 299_999], [131_072, 262_144]])
def test_far_changes_are_bridged_by_numbers_that_did_not_change(places: list[int]) -> None:
    before = torch.zeros(300_000)
    after = before.clone()
    after[places] = 1
    found = patch(before, after)
    assert set(places) <= set(found.positions.tolist())
    assert len(found.values) <= len(places) + 4
    assert found.values.sum() == len(places)
    scatter(found, before)
    assert torch.equal(before, after)


def test_what_would_take_more_room_goes_whole_and_is_the_base_of_the_next() -> None:
    before, delta = torch.zeros(64), Delta()
    delta.encode(block_of(before), before.clone(), False)
    assert isinstance(delta.encode(block_of(before), torch.ones(64), False), WeightShard)
    assert len(delta.encode(block_of(before), torch.ones(64), False).values) == 0  # type: ignore[union-attr]
    assert isinstance(delta.encode(block_of(before), torch.ones(64), True), WeightShard)


def test_the_trainers_tensor_is_not_kept() -> None:
    held, delta = torch.zeros(64), Delta()
    delta.encode(block_of(held), held, False)
    held[5] = 1
    assert delta.encode(block_of(held), held, False).block == Entry(block_of(held), 1).block
    held[6] = 1
    found = delta.encode(block_of(held), held, False)
    assert isinstance(found, WeightPatch)
    assert found.positions.tolist() == [6]
