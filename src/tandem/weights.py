"""A model's weights as they pass between engines: names and shapes, blocks, what changed of a block, and one hash of the bits.

Nothing is moved here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

T = TypeVar("T")

_AHEAD = 16
AT_ONCE = 1 << 18
"""Numbers that are cast, copied or compared at a time, so that they lie in a processor's cache when they are hashed."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Where a weight lives, in Hugging Face coordinates. tied_to: the name that owns the storage, if another does.

    wire: the dtype in which it may be sent, since whoever computes with this model sees no more of it; None is its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tied_to: str | None = None
    wire: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All weights of a model; `replicas` whole copies of them exist, and this rank holds shards of copy `replica`.

    index: of this rank, among those of all copies.
    """

    specs: tuple[WeightSpec, ...]
    replicas: int = 1
    replica: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """Which numbers: those of weight `name` of shape `shape` that stand from `offsets` on, `size` of them along each dimension."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the whole weight."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.size, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class WeightShard:
    """A block of one weight: `tensor` sits at `offsets` of the global weight `name` of shape `shape`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def block(self) -> WeightBlock:
        return WeightBlock(self.name, tuple(self.shape), tuple(self.offsets), tuple(self.tensor.shape), self.tensor.dtype)

    @classmethod
    def of(cls, block: WeightBlock, tensor: Tensor) -> WeightShard:
        return cls(block.name, block.shape, block.offsets, tensor)


@dataclass(frozen=True, slots=True, eq=False)
class WeightPatch:
    """Which bytes of a block changed, and what they are now.

    A step of training changes the last byte of most numbers that it changes, and no other. So bytes are told plane by plane: first
    the last ones of the numbers that changed, in the order of the numbers; then the last but one of those among these numbers where
    that changed too, and so on. gaps: uint8 [n], from each to the next: counted in numbers of the block for the first plane, and in
    entries of the first plane for the others; values: uint8 [n]. Every plane begins with a gap of 1 from before its first place and
    ends with its last place. Where two changes lie farther apart than 255, bytes that did not change are among the values.
    """

    block: WeightBlock
    gaps: Tensor
    values: Tensor

    def planes(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each byte of a number, the last one first: which numbers, int64, and what it is of each, uint8."""
        counted, before = self.gaps.cumsum(0) - 1, self.block.numel
        start = int(torch.searchsorted(counted, before))
        numbers = counted[:start]
        yield numbers, self.values[:start]
        for _ in range(self.block.dtype.itemsize - 1):
            end = int(torch.searchsorted(counted, before + len(numbers)))
            yield numbers[counted[start:end] - before], self.values[start:end]
            start, before = end, before + len(numbers)

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes


WeightPiece = WeightShard | WeightPatch

Room = Callable[[WeightBlock], Tensor | None]
"""Says where the numbers of a block may be written: contiguous memory of its size and dtype, or nowhere."""


def nowhere(block: WeightBlock) -> None:
    """The room for who wants all pieces."""
    del block


@dataclass(frozen=True, slots=True)
class OpenedWeights:
    """What others have to know of a rank that will send its weights.

    host: the same for processes that see each other's memory. blocks: that it sends, in order, in the dtype of the wire. at: where,
    or as whom.
    """

    host: str
    blocks: tuple[WeightBlock, ...]
    at: str


@dataclass(frozen=True, slots=True)
class SentWeights:
    """By one rank. wire_hash: of all that it holds, in the dtype of the wire, whatever of it was sent.

    num_bytes: that were sent; whole_bytes: that everything would have been.
    """

    wire_hash: str
    num_bytes: int
    whole_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart:
    """What one rank holds of a model, and the hash of it: `wire_hash(shards)`."""

    layout: WeightLayout
    shards: tuple[WeightShard, ...]
    wire_hash: str


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a rollout engine has, to be compared with the trainer's.

    wire_hashes: of each sequence of blocks that was asked for (`wire_hash`). logprobs: of each row, float32, of each
    token from the second on, given those before it, at temperature 1. tolerance: by how much these may differ, as it declares.
    """

    wire_hashes: tuple[str, ...]
    logprobs: tuple[NDArray[np.float32], ...]
    tolerance: float


def whole_shards(module: nn.Module) -> Iterator[WeightShard]:
    """The weights of a module that holds all of them."""
    for name, parameter in module.named_parameters():
        yield WeightShard(name, tuple(parameter.shape), (0,) * parameter.ndim, parameter.detach())


def wire_hash(shards: Iterable[WeightShard]) -> str:
    """One hash for a set of weights, the same wherever it is computed: two holders of equal weights agree on it. Hexadecimal.

    xxh3 (128 bits) over that of each block, in the order given: over its name, global shape, offsets, dtype and bits. It says that
    the bits are equal, not that they are right.
    """
    return joined_hash(block_hash(shard.block, shard.tensor) for shard in shards)


def joined_hash(hashes: Iterable[bytes]) -> str:
    """Of the hashes of blocks: see wire_hash."""
    digest = xxhash.xxh3_128()
    for each in hashes:
        digest.update(each)
    return digest.hexdigest()


def block_hash(block: WeightBlock, tensor: Tensor) -> bytes:
    """See wire_hash. tensor: of the block's size; of another dtype, it counts as what it is when cast to the block's."""
    growing = BlockHash(block)
    growing.update(tensor)
    return growing.digest()


class BlockHash:
    """That of a block whose numbers come in parts, row by row: see block_hash."""

    def __init__(self, block: WeightBlock) -> None:
        self._dtype, self._digest = block.dtype, xxhash.xxh3_128(_said(block))
        self.digest = self._digest.digest

    def update(self, part: Tensor) -> None:
        flat = part.detach().cpu().reshape(-1)
        at_once = AT_ONCE if flat.dtype != self._dtype else max(1, len(flat))
        for start in range(0, len(flat), at_once):
            self._digest.update(flat[start : start + at_once].to(self._dtype).contiguous().view(torch.uint8).numpy().data)


@lru_cache(1 << 16)
def _said(block: WeightBlock) -> bytes:
    return repr((block.name, block.shape, block.offsets, block.size, str(block.dtype))).encode()


def ahead(do: Callable[[int], T], count: int) -> Iterator[T]:
    """`do` of 0 to count - 1 in order, done in two threads some numbers before they are asked for."""
    coming: deque[Future[T]] = deque()
    with ThreadPoolExecutor(2) as pool:
        for number in range(count):
            coming.append(pool.submit(do, number))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def two_at_a_time(do: Callable[[int], T], count: int) -> list[T]:
    """`do` of 0 to count - 1, in two threads: one core that copies or hashes does not use all that memory gives."""
    left, done = iter(range(count)), dict[int, T]()

    def work() -> None:
        for number in left:
            done[number] = do(number)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        work()
        other.result()
    return [done[number] for number in range(count)]
