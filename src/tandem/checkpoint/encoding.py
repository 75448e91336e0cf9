"""What is sent of a block: all of it, or the bytes that differ from what was sent last."""

from __future__ import annotations

import threading
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.weights import AT_ONCE, BlockHash, WeightBlock, WeightPatch, WeightPiece, WeightShard

Bytes = npt.NDArray[np.uint8]
_FARTHEST, _NOTHING = 255, np.empty(0, np.uint8)
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
        gaps, values = _overwritten(before.view(-1), tensor.detach().reshape(-1), growing)
        patch = WeightPatch(block, torch.from_numpy(gaps), torch.from_numpy(values))
        return patch if patch.nbytes < block.nbytes else WeightShard.of(block, before)


class _Room(threading.local):
    """Of a thread, to be used again and again: pages that are new cost as much as a copy."""

    def __init__(self) -> None:
        self.cast, self.which = torch.empty(8 * AT_ONCE, dtype=torch.uint8), np.empty(AT_ONCE, np.bool_)


_room = _Room()


class _Plane:
    """Of a WeightPatch, part by part, each of which has its first place in it."""

    def __init__(self) -> None:
        self.gaps, self.values, self._before = list[Bytes](), list[Bytes](), 1

    def add(self, places: npt.NDArray[np.int64], values: Bytes, count: int) -> None:
        """Of a part of so many places."""
        self.gaps.append(_gaps(places, self._before))
        self.values.append(values)
        self._before = count - int(places[-1])


def _overwritten(before: Tensor, now: Tensor, growing: BlockHash) -> tuple[Bytes, Bytes]:
    """Writes what is now, cast, over what was before, both flat, and hashes it: gaps and values of a WeightPatch."""
    kind = _INTEGERS[before.dtype.itemsize]
    held, changed = before.view(kind).numpy(), False
    first, *others = (_Plane() for _ in range(held.itemsize))
    room, which = _room.cast.view(before.dtype), _room.which
    for start in range(0, len(held), AT_ONCE):
        part, ends = now[start : start + AT_ONCE], start + AT_ONCE >= len(held)
        cast = room[: len(part)].copy_(part)
        growing.update(cast)
        new, old = cast.view(kind).numpy(), held[start : start + AT_ONCE]
        numbers = _marked(np.not_equal(new, old, out=which[: len(new)]), ends=ends)
        news = new.take(numbers)
        differences = old.take(numbers) ^ news
        old[numbers] = news
        changed = changed or bool(differences.any())
        now_bytes, differ = (each.view(np.uint8).reshape(-1, held.itemsize).T for each in (news, differences))
        first.add(numbers, now_bytes[0].copy(), len(new))
        for plane, differs, value in zip(others, differ[1:], now_bytes[1:], strict=True):
            among = _marked(differs != 0, ends=ends)
            plane.add(among, value[among], len(numbers))
    if not changed:
        return _NOTHING, _NOTHING
    planes = (first, *others)
    gaps, values = [each for plane in planes for each in plane.gaps], [each for plane in planes for each in plane.values]
    return np.concatenate(gaps), np.concatenate(values)


def _marked(which: npt.NDArray[np.bool_], *, ends: bool) -> npt.NDArray[np.int64]:
    """Where it is true, and at so many other places that none is farther from the one before than a gap can say."""
    which[::_FARTHEST] = True
    if ends:
        which[-1] = True
    return which.nonzero()[0]


def _gaps(places: npt.NDArray[np.int64], first: int) -> Bytes:
    """From each to the next; first: that of the first of them."""
    low = places.astype(np.uint8)  # enough of a number to tell a difference of less than 256
    gaps = np.empty_like(low)
    gaps[0] = first
    np.subtract(low[1:], low[:-1], out=gaps[1:])
    return gaps
