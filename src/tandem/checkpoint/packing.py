"""Pieces of weights as bytes in a row, and a list that says which they are: what lies in shared memory, in a file, in a bucket."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.weights import WeightBlock, WeightPatch, WeightPiece, WeightShard

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """A piece without its numbers. changes: how many of a patch; None for a whole block."""

    block: WeightBlock
    changes: int | None

    @property
    def size(self) -> int:
        """Bytes."""
        if self.changes is None:
            return self.block.nbytes
        return self.gaps_at + 2 * self.changes

    @property
    def gaps_at(self) -> int:
        """Where they begin in a patch, behind its values."""
        size = (self.changes or 0) * self.block.dtype.itemsize
        return size + size % 2

    @property
    def nbytes(self) -> int:
        """Up to where the next may begin, for any dtype."""
        return _aligned(self.size)


def entries_of(pieces: Sequence[WeightPiece], blocks: Sequence[WeightBlock]) -> list[tuple[WeightPiece, Entry]]:
    """blocks: those of the pieces, in the dtype of the wire."""
    return [
        (piece, Entry(block, len(piece.values) if isinstance(piece, WeightPatch) else None))
        for piece, block in zip(pieces, blocks, strict=True)
    ]


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


def write(piece: WeightPiece, into: WeightPiece) -> None:
    """Copies numbers to where `read` has them; a shard is cast on its way."""
    for mine, source in zip(_tensors(into), _tensors(piece), strict=True):
        mine.copy_(source)


def read(of: Entry, memory: Tensor) -> WeightPiece:
    """The piece that is written there; its tensors lie in the memory, which is uint8 and at least `of.size`."""
    views = _views(of, memory)
    if of.changes is None:
        return WeightShard.of(of.block, views[0])
    values, gaps = views
    return WeightPatch(of.block, gaps, values)


def _tensors(piece: WeightPiece) -> tuple[Tensor, ...]:
    return (piece.values, piece.gaps) if isinstance(piece, WeightPatch) else (piece.tensor,)


def _views(of: Entry, memory: Tensor) -> tuple[Tensor, ...]:
    if of.changes is None:
        return (memory[: of.block.nbytes].view(of.block.dtype).view(of.block.size),)
    values, gaps = memory[: of.changes * of.block.dtype.itemsize], memory[of.gaps_at : of.size]
    return values.view(of.block.dtype), gaps.view(torch.uint16)


class Part(NamedTuple):
    """Of a piece, or all of it. ends: the place of the piece of which it is the last."""

    piece: WeightPiece
    entry: Entry
    ends: int | None


def parts_of(pieces: Sequence[WeightPiece], blocks: Sequence[WeightBlock], most: int) -> list[Part]:
    """All of them, of at most `most` bytes each, as `cut` makes them."""
    found: list[Part] = []
    for place, (piece, entry) in enumerate(entries_of(pieces, blocks)):
        found += [Part(*each, None) for each in cut(piece, entry, most)]
        found[-1] = found[-1]._replace(ends=place)
    return found


def cut(piece: WeightPiece, of: Entry, most: int) -> Iterator[tuple[WeightPiece, Entry]]:
    """A shard as blocks of rows of at most `most` bytes, or of one row; a patch as it is."""
    block = of.block
    if isinstance(piece, WeightPatch) or block.nbytes <= most or not block.size:
        yield piece, of
        return
    rows = max(1, most // (block.nbytes // block.size[0]))
    for start in range(0, block.size[0], rows):
        part = piece.tensor[start : start + rows]
        offsets = (block.offsets[0] + start, *block.offsets[1:])
        yield (
            WeightShard(block.name, block.shape, offsets, part),
            Entry(WeightBlock(block.name, block.shape, offsets, tuple(part.shape), block.dtype), None),
        )


def grouped(entries: Iterable[Entry], most: int) -> list[list[Entry]]:
    """In order, in groups of at most `most` bytes, or of one."""
    groups: list[list[Entry]] = []
    room = -1
    for each in entries:
        if each.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(each)
        room -= each.nbytes
    return groups


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
