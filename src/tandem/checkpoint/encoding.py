"""What is sent of a block: all of it, or the bytes that differ from what was sent last."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.weights import AT_ONCE, BlockHash, WeightBlock, WeightPatch, WeightPiece, WeightShard

Bytes = npt.NDArray[np.uint8]
_INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}  # bits: NaN equals itself, 0 is not -0


class Encoding(Protocol):
    """One rank's. hashes: whether `encode` hashes what is held, which otherwise is left to whoever reads the piece.

    whole: asks for all of the block, whatever changed.
    """

    hashes: ClassVar[bool]

    def encode(self, block: WeightBlock, tensor: Tensor, whole: bool, growing: BlockHash) -> WeightPiece: ...


class Full:
    """Implements Encoding. A shard's tensor is the trainer's own, to be cast to the block's dtype on its way."""

    hashes: ClassVar[bool] = False

    def encode(self, block: WeightBlock, tensor: Tensor, whole: bool, growing: BlockHash) -> WeightPiece:
        del whole, growing
        return WeightShard.of(block, tensor)


class Delta:
    """Implements Encoding. Keeps the bits sent last, as many as the rank holds. A block whose changes would take more room than
    all of it goes whole.
    """

    hashes: ClassVar[bool] = True

    def __init__(self) -> None:
        self._sent: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def encode(self, block: WeightBlock, tensor: Tensor, whole: bool, growing: BlockHash) -> WeightPiece:
        key = block.name, block.offsets
        before = self._sent.get(key)
        if before is None or whole:
            before = self._sent.setdefault(key, torch.empty(block.size, dtype=block.dtype))
            before.copy_(tensor.detach())
            growing.update(before)
            return WeightShard.of(block, before)
        changes = _overwritten(before.view(-1), tensor.detach().reshape(-1), growing)
        patch = WeightPatch(block, *(torch.from_numpy(np.concatenate(each)) for each in changes))
        return patch if patch.nbytes < block.nbytes else WeightShard.of(block, before)


def _overwritten(before: Tensor, now: Tensor, growing: BlockHash) -> tuple[list[Bytes], list[Bytes]]:
    """Writes what is now, cast, over what was before, both flat, and hashes it: gaps and values of a WeightPatch, in parts.

    Where anything changed, every plane ends with its last byte, so that the next one begins as the first does.
    """
    kind, numel = _INTEGERS[before.dtype.itemsize], len(before)
    integers, per_word = before.view(kind).numpy(), 8 // before.dtype.itemsize
    planes = [_Plane(integers, 8 * byte) for byte in range(before.dtype.itemsize)]
    words = np.empty(AT_ONCE // per_word, np.uint64)  # a word that is 0 says at once that none of its numbers changed
    differ = words.view(integers.dtype)
    for start in range(0, numel, AT_ONCE):
        new = now[start : start + AT_ONCE].to("cpu", before.dtype)
        growing.update(new)
        np.bitwise_xor(integers[start : start + AT_ONCE], new.view(kind).numpy(), out=differ[: len(new)])
        differ[len(new) :] = 0
        (changed,) = (words != 0).nonzero()
        if len(changed):
            before[start : start + AT_ONCE].copy_(new)
            among = words[changed].view(integers.dtype)
            for plane in planes:
                (places,) = ((among & plane.mask) != 0).nonzero()
                plane.add(start + changed[places // per_word] * per_word + places % per_word)
    if any(plane.last >= 0 for plane in planes):
        for plane in planes:
            if plane.last < numel - 1:
                plane.add(np.array([numel - 1]))
    return [gap for plane in planes for gap in plane.gaps], [value for plane in planes for value in plane.values]


class _Plane:
    """One byte of every number: which of them changed, as they are added in order. integers: the numbers, new ones by then."""

    def __init__(self, integers: npt.NDArray[Any], shift: int) -> None:
        self._integers, self._shift = integers, shift
        self.mask = integers.dtype.type(0xFF << shift)
        self.gaps, self.values, self.last = [np.empty(0, np.uint8)], [np.empty(0, np.uint8)], -1

    def add(self, numbers: npt.NDArray[np.int64]) -> None:
        """And others between them where two neighbours lie farther apart than a gap can say."""
        if not len(numbers):
            return
        passed = numbers - 1
        passed[0] -= self.last
        passed[1:] -= numbers[:-1]
        gaps = passed.astype(np.uint8)
        if passed.max() > 255:
            places = np.arange(len(passed)) + np.cumsum(passed >> 8)
            gaps = np.full(places[-1] + 1, 255, np.uint8)
            gaps[places] = passed & 255
            numbers = self.last + np.cumsum(gaps + np.int64(1))
        self.last = int(numbers[-1])
        self.gaps.append(gaps)
        self.values.append((self._integers[numbers] >> self._shift).astype(np.uint8))
