"""What is sent of a block: all of it, or the positions and values that differ from what was sent last, bit by bit."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.weights import WeightBlock, WeightPatch, WeightPiece, WeightShard

_FARTHEST = 1 << 16  # how far one position may lie behind the one before it
_AT_ONCE = 1 << 17  # numbers that are cast and compared at a time, so that they stay in a processor's cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bits are compared: NaN equals itself, 0 is not -0


class Encoding(Protocol):
    """One rank's. `whole` asks for all of the block, whatever changed."""

    def encode(self, block: WeightBlock, tensor: Tensor, whole: bool) -> WeightPiece: ...


class Full:
    """Implements Encoding. A shard's tensor is the trainer's own, to be cast to the block's dtype on its way."""

    def encode(self, block: WeightBlock, tensor: Tensor, whole: bool) -> WeightPiece:
        del whole
        return WeightShard.of(block, tensor)


class Delta:
    """Implements Encoding. Keeps the bits sent last, as many as the rank holds. A block whose changes would take more room than
    all of it goes whole.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def encode(self, block: WeightBlock, tensor: Tensor, whole: bool) -> WeightPiece:
        key = block.name, block.offsets
        before = self._sent.get(key)
        if before is None or whole:
            before = self._sent.setdefault(key, torch.empty(block.size, dtype=block.dtype))
            before.copy_(tensor.detach())
            return WeightShard.of(block, before)
        changed, values = _overwritten(before.view(-1), tensor.detach().reshape(-1))
        positions = _bridged(changed)
        if len(positions) * (2 + block.dtype.itemsize) >= block.nbytes:
            return WeightShard.of(block, before)
        if len(positions) > len(changed):
            values = before.view(-1)[torch.from_numpy(positions)]
        gaps = torch.from_numpy((np.diff(positions, prepend=-1) - 1).astype(np.uint16))
        return WeightPatch(block, gaps, values)


def _overwritten(before: Tensor, now: Tensor) -> tuple[npt.NDArray[np.int64], Tensor]:
    """Writes what is now, cast, over what was before, both flat: the positions at which bits differed, and what is there now."""
    kind = _INTEGERS[before.dtype.itemsize]
    positions, values = [np.empty(0, np.int64)], [before[:0]]
    for start in range(0, len(now), _AT_ONCE):
        new = now[start : start + _AT_ONCE].to("cpu", before.dtype)
        old = before[start : start + _AT_ONCE]
        at = np.flatnonzero(old.view(kind).numpy() != new.view(kind).numpy())
        if len(at):
            positions.append(at + start)
            values.append(new[torch.from_numpy(at)])
            old.copy_(new)
    return np.concatenate(positions), torch.cat(values)


def _bridged(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """With positions added where two neighbours lie farther apart than a gap can say."""
    steps = np.diff(positions, prepend=-1)
    wide = np.flatnonzero(steps > _FARTHEST)
    if not len(wide):
        return positions
    between: list[npt.NDArray[np.int64]] = [np.arange(positions[i] - steps[i] + _FARTHEST, positions[i], _FARTHEST) for i in wide]
    return np.sort(np.concatenate([positions, *between]))
