"""Through memory that both ends see, on one machine: each rank writes once, and readers use the bytes where they lie.

A rank has two buffers and writes them in turn, so that what readers use stays until the publish after the next. Each is an
anonymous file (memfd) of its process, found under /proc: nothing is left of it when the last process that maps it is gone.

Layout of a buffer, int64:   number when writing began  |  number when it ended  |  bytes of the list  |  then list and pieces

A reader that finds another number before or after it has read, or while it still uses the bytes, has not read what it was told to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from tandem.checkpoint.packing import Contents, Entry, entry_of, read, unlisted, write
from tandem.checkpoint.transport import Outlet, Seen, this_host
from tandem.errors import EngineError
from tandem.weights import OpenedWeights, Room, WeightBlock, WeightPatch, WeightPiece, nowhere, two_at_a_time

_HEAD_BYTES = 64
_BEGAN, _ENDED, _LIST = 0, 1, 2  # of the head
_CHANGES_DIGITS = 24  # room for the list to grow by, a block: a patch says how much changed
_serials = count()  # of this process's senders


Laid = tuple[WeightBlock, WeightPiece]


class Buffer:
    """One of the two, mapped."""

    def __init__(self, path: str, size: int) -> None:
        try:
            self.bytes: Tensor = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        except RuntimeError as error:
            raise EngineError(
                f"{size >> 20} MB of shared memory at {path} cannot be mapped: {error}. Where an engine is on another machine than "
                "the trainer, choose checkpoint=collective"
            ) from error
        self._head = self.bytes[:_HEAD_BYTES].view(torch.int64)
        self._names, self._laid = b"", list[Laid]()

    def write(self, number: int, contents: Contents, pieces: Sequence[WeightPiece], seen: Seen) -> None:
        names = contents.names
        self._head[_BEGAN], self._head[_LIST] = number, len(names)
        self.bytes[_HEAD_BYTES : _HEAD_BYTES + len(names)] = torch.frombuffer(bytearray(names), dtype=torch.uint8)
        laid = self._lay(names, contents.entries)

        two_at_a_time(lambda place: write(pieces[place], laid[place][1], partial(seen, place)), len(pieces))
        self._head[_ENDED] = number

    def check(self, number: int) -> None:
        began, ended = int(self._head[_BEGAN]), int(self._head[_ENDED])
        if (began, ended) != (number, number):
            raise EngineError(
                f"weights number {number} are gone: their memory holds number {ended}"
                + f", and {began} is being written" * (began != ended)
            )

    def read(self, number: int) -> list[Laid]:
        """Raises EngineError where another number is there."""
        self.check(number)
        names = self.bytes[_HEAD_BYTES : _HEAD_BYTES + int(self._head[_LIST])].numpy().tobytes()
        self.check(number)
        return self._lay(names)

    def _lay(self, names: bytes, entries: Iterable[Entry] = ()) -> list[Laid]:
        """The pieces of a list, as they lie here: the same as of the last one, if that named the same."""
        if names != self._names:
            at, laid = _after(len(names)), list[Laid]()
            for each in entries or unlisted(names):
                laid.append((each.block, read(each, self.bytes[at : at + each.nbytes])))
                at += each.nbytes
            self._names, self._laid = names, laid
        return self._laid


def _after(list_bytes: int) -> int:
    return -(-(_HEAD_BYTES + list_bytes) // _HEAD_BYTES) * _HEAD_BYTES


class MemorySender:
    """Implements transport.Sender."""

    def __init__(self, index: int, blocks: Sequence[WeightBlock]) -> None:
        self._whole = Contents(tuple(Entry(block, None) for block in blocks))
        room = _after(len(self._whole.names) + _CHANGES_DIGITS * len(blocks))
        size = room + sum(entry.nbytes for entry in self._whole.entries)
        self._files = [os.memfd_create(f"tandem-weights-{index}-{number}") for number in range(2)]
        for file in self._files:
            os.ftruncate(file, size)
        self._buffers = [Buffer(f"/proc/self/fd/{file}", size) for file in self._files]
        at = (os.getpid(), next(_serials), size, *self._files)  # the files' numbers may have been another sender's
        self.opened = OpenedWeights(this_host(), tuple(blocks), " ".join(map(str, at)))

    def send(self, number: int, pieces: Iterable[WeightPiece], seen: Seen) -> int:
        contents, held = self._whole, list(pieces)
        if any(isinstance(piece, WeightPatch) for piece in held):
            contents = Contents(tuple(map(entry_of, held, self.opened.blocks)))
        self._buffers[number % 2].write(number, contents, held, seen)
        return contents.size

    def close(self) -> None:
        self._buffers.clear()
        while self._files:
            os.close(self._files.pop())


@dataclass
class MemoryReader:
    """Implements transport.Reader. at: where each rank's buffers are. They are mapped once a process, where a source is opened."""

    at: tuple[str, ...]
    _mapped: dict[str, Buffer] = field(default_factory=dict[str, Buffer])

    def source(self, number: int) -> MemorySource:
        return MemorySource(self, number)

    def buffers(self, number: int) -> list[Buffer]:
        return [self._buffer(at, number) for at in self.at]

    def _buffer(self, at: str, number: int) -> Buffer:
        pid, _, size, *files = map(int, at.split())
        path = f"/proc/{pid}/fd/{files[number % 2]}"
        if path not in self._mapped:
            self._mapped[path] = Buffer(path, size)
        return self._mapped[path]

    def __reduce__(self) -> tuple[Callable[..., MemoryReader], tuple[tuple[str, ...]]]:
        return _arrived, (self.at,)


@lru_cache(1)
def _arrived(at: tuple[str, ...]) -> MemoryReader:
    """The one of this process, which has mapped the buffers already."""
    return MemoryReader(at)


class MemorySource:
    """Implements ports.WeightSource; opened where it is first looked at, so that it may travel. What `shards` gives lies in the
    shared memory and may be used there until the publish after the next; `check` raises EngineError where it was overwritten
    meanwhile.
    """

    shared = False

    def __init__(self, reader: MemoryReader, number: int) -> None:
        self._reader, self._number = reader, number

    @cached_property
    def _buffers(self) -> list[Buffer]:
        return self._reader.buffers(self._number)

    @cached_property
    def _laid(self) -> list[Laid]:
        return [each for buffer in self._buffers for each in buffer.read(self._number)]

    @property
    def blocks(self) -> tuple[WeightBlock, ...]:
        return tuple(block for block, _ in self._laid)

    def shards(self, room: Room = nowhere) -> Iterator[WeightPiece]:
        """Raises EngineError at the end where something was overwritten while it was read."""
        del room
        for _, piece in self._laid:
            yield piece
        self.check()

    def check(self) -> None:
        for buffer in self._buffers:
            buffer.check(self._number)

    def __reduce__(self) -> tuple[type[MemorySource], tuple[MemoryReader, int]]:
        return MemorySource, (self._reader, self._number)


class SharedMemory:
    """Implements transport.Transport."""

    name: ClassVar[str] = "shared_memory"
    moves: ClassVar[bool] = True
    far: ClassVar[bool] = False
    meets: ClassVar[bool] = False

    def outlet(self, readers: int) -> Outlet:
        self._count = readers
        return MemorySender

    def readers(self, opened: Sequence[OpenedWeights]) -> Sequence[MemoryReader]:
        if elsewhere := [rank for rank, each in enumerate(opened) if each.host != this_host()]:
            raise EngineError(
                f"rank {elsewhere[0]} of the trainer is on another machine, whose memory cannot be read here: "
                "choose checkpoint=collective, or checkpoint=disk with a directory that both see"
            )
        return [MemoryReader(tuple(each.at for each in opened)) for _ in range(self._count)]

    def close(self) -> None: ...
