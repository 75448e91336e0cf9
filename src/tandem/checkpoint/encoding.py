"""What is sent of a block: all of it, or the positions and values that differ from what was sent last, bit by bit."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.weights import WeightBlock, WeightPatch, WeightPiece, WeightShard

_FARTHEST = 1 << 16  # how far one position may lie behind the one before it
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
        now = tensor.detach().to("cpu", block.dtype).contiguous()
        before = self._sent.get(key)
        if before is None:
            before = self._sent[key] = now.clone() if now.data_ptr() == tensor.data_ptr() else now
            return WeightShard.of(block, before)
        positions = _bridged(_differing(before, now))
        room = len(positions) * (2 + block.dtype.itemsize)
        if whole or room >= block.nbytes:
            before.copy_(now)
            return WeightShard.of(block, before)
        at = torch.from_numpy(positions)
        values = now.view(-1)[at]
        before.view(-1)[at] = values
        gaps = torch.from_numpy((np.diff(positions, prepend=-1) - 1).astype(np.uint16))
        return WeightPatch(block, gaps, values)


def _differing(before: Tensor, now: Tensor) -> npt.NDArray[np.int64]:
    """Positions at which two contiguous tensors of one shape and dtype differ; words of eight bytes are compared first."""
    kind = _INTEGERS[now.dtype.itemsize]
    old, new = (tensor.view(-1).view(kind).numpy() for tensor in (before, now))
    a_word = 8 // now.dtype.itemsize
    end = len(old) // a_word * a_word
    rest = end + np.flatnonzero(old[end:] != new[end:])
    if a_word == 1 or any(array.ctypes.data % 8 for array in (old, new)):
        return np.flatnonzero(old != new)
    words = np.flatnonzero(old[:end].view(np.int64) != new[:end].view(np.int64))
    near = (words[:, None] * a_word + np.arange(a_word)).reshape(-1)
    return np.concatenate([near[old[near] != new[near]], rest])


def _bridged(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """With positions added where two neighbours lie farther apart than a gap can say."""
    steps = np.diff(positions, prepend=-1)
    wide = np.flatnonzero(steps > _FARTHEST)
    if not len(wide):
        return positions
    between: list[npt.NDArray[np.int64]] = [np.arange(positions[i] - steps[i] + _FARTHEST, positions[i], _FARTHEST) for i in wide]
    return np.sort(np.concatenate([positions, *between]))
