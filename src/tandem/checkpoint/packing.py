"""Pieces of weights as bytes in a row, and a list that says which they are: what lies in shared memory, in a file, in a bucket."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.weights import AT_ONCE, WeightBlock, WeightPatch, WeightPiece, WeightShard

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """A piece without its numbers. changes: how many bytes of a patch; None for a whole block."""

    block: WeightBlock
    changes: int | None

    @property
    def size(self) -> int:
        """Bytes."""
        if self.changes is None:
            return self.block.nbytes
        return 2 * self.changes

    @property
    def nbytes(self) -> int:
        """Up to where the next may begin, for any dtype."""
        return _aligned(self.size)


def entry_of(piece: WeightPiece, block: WeightBlock) -> Entry:
    """block: the piece's, in the dtype of the wire."""
    return Entry(block, len(piece.values) if isinstance(piece, WeightPatch) else None)


@dataclass(frozen=True)
class Contents:
    """Which pieces lie one behind the other."""

    entries: tuple[Entry, ...]

    @cached_property
    def names(self) -> bytes:
        """As a list."""
        return listed(self.entries)

    @cached_property
    def size(self) -> int:
        """Bytes."""
        return sum(entry.size for entry in self.entries)


def write(piece: WeightPiece, into: WeightPiece, seen: Callable[[Tensor], None]) -> None:
    """Copies numbers to where `read` has them; a shard is cast on its way, and `seen` is given it part by part, as it was read."""
    if isinstance(piece, WeightPatch) and isinstance(into, WeightPatch):
        into.values.copy_(piece.values)
        into.gaps.copy_(piece.gaps)
    elif isinstance(piece, WeightShard) and isinstance(into, WeightShard):
        for source, mine in zip(_rows(piece.tensor), _rows(into.tensor), strict=True):
            mine.copy_(source)
            seen(source)


def read(of: Entry, memory: Tensor) -> WeightPiece:
    """The piece that is written there; its tensors lie in the memory, which is uint8 and at least `of.size`."""
    views = _views(of, memory)
    if of.changes is None:
        return WeightShard.of(of.block, views[0])
    values, gaps = views
    return WeightPatch(of.block, gaps, values)


def _rows(tensor: Tensor) -> Sequence[Tensor]:
    """Some at a time."""
    if tensor.numel() <= AT_ONCE:
        return (tensor,)
    some = max(1, AT_ONCE * len(tensor) // tensor.numel())
    return [tensor[start : start + some] for start in range(0, len(tensor), some)]


def _views(of: Entry, memory: Tensor) -> tuple[Tensor, ...]:
    if of.changes is None:
        return (memory[: of.block.nbytes].view(of.block.dtype).view(of.block.size),)
    return memory[: of.changes], memory[of.changes : of.size]


class Part(NamedTuple):
    """Of the piece at that place, or all of it."""

    place: int
    piece: WeightPiece
    entry: Entry


def buckets(
    pieces: Iterable[WeightPiece], blocks: Sequence[WeightBlock], most_bytes: int, most: int | None = None
) -> Iterator[list[Part]]:
    """All pieces in order, their shards as `cut` makes them: at most `most` parts together, of `most_bytes` of weights, or one.

    A patch counts as its whole block, so that what changed in some blocks does not wait for many others to be compared.
    """
    bucket, room = list[Part](), most_bytes
    for place, (piece, block) in enumerate(zip(pieces, blocks, strict=True)):
        for each in _parts(place, piece, block, most_bytes):
            whole_bytes = each.entry.block.nbytes
            if bucket and (whole_bytes > room or len(bucket) == most):
                yield bucket
                bucket, room = [], most_bytes
            bucket.append(each)
            room -= whole_bytes
    if bucket:
        yield bucket


def _parts(place: int, piece: WeightPiece, block: WeightBlock, most: int) -> Iterator[Part]:
    if isinstance(piece, WeightPatch):
        yield Part(place, piece, entry_of(piece, block))
        return
    for part in cut(block, most):
        rows = piece.tensor if part is block else piece.tensor[part.offsets[0] - block.offsets[0] :][: part.size[0]]
        yield Part(place, WeightShard.of(part, rows), Entry(part, None))


def cut(block: WeightBlock, most: int) -> Iterator[WeightBlock]:
    """As blocks of rows of at most `most` bytes, or of one row."""
    if block.nbytes <= most or not block.size:
        yield block
        return
    rows = max(1, most // (block.nbytes // block.size[0]))
    for start in range(0, block.size[0], rows):
        offsets = (block.offsets[0] + start, *block.offsets[1:])
        size = (min(rows, block.size[0] - start), *block.size[1:])
        yield WeightBlock(block.name, block.shape, offsets, size, block.dtype)


def listed(entries: Sequence[Entry]) -> bytes:
    """Inverse of `unlisted`."""
    rows = [
        (each.block.name, each.block.shape, each.block.offsets, each.block.size, str(each.block.dtype)[6:], each.changes)
        for each in entries
    ]
    return json.dumps(rows).encode()


def unlisted(data: bytes) -> list[Entry]:
    """Raises EngineError for what is no list."""
    try:
        rows = cast("list[list[Any]]", json.loads(data))
        return [
            Entry(WeightBlock(name, tuple(shape), tuple(offsets), tuple(size), getattr(torch, dtype)), changes)
            for name, shape, offsets, size, dtype, changes in rows
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise EngineError(f"a list of weights cannot be read: {error}") from error


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN
