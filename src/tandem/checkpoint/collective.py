"""Through torch.distributed, to any machine: each rank broadcasts what it holds to all readers, in flat buckets.

A rank and the readers are a group of their own, so that no rank is sent what another one holds, and the ranks of a sharded model
send at once. First comes the list of what will come; then bucket after bucket, the next one on its way while the last is used.
When readers come or go the groups are made anew, under another name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] documented there

from tandem import device
from tandem.checkpoint.packing import Entry, Part, grouped, listed, parts_of, read, unlisted, write
from tandem.checkpoint.transport import Outlet, Seen, this_host
from tandem.device import Address, Broadcasts, Device
from tandem.weights import OpenedWeights, WeightBlock, WeightPiece, WeightShard


@dataclass(frozen=True)
class Meeting:
    """Where a set of readers meets the ranks. name: that no other set has had. bucket_bytes: of a bucket, unless one row of a
    weight, or what changed in one, is more.
    """

    address: Address
    name: str
    readers: int
    device: Device
    bucket_bytes: int
    limit_s: float

    def join(self, rank: int, place: int) -> Broadcasts:
        """The group of a rank of the trainer, in which it has place 0."""
        name = f"{self.name} of rank {rank}"
        return Broadcasts(self.device, name, place, 1 + self.readers, self.address, self.limit_s)

    def tensor(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device.torch)


class CollectiveSender:
    """Implements transport.Sender."""

    def __init__(self, meeting: Meeting, index: int, blocks: Sequence[WeightBlock]) -> None:
        self._meeting, self._index = meeting, index
        self._group: Broadcasts | None = None
        self._packed = [meeting.tensor(0)] * 2  # of every other bucket
        self.opened = OpenedWeights(this_host(), tuple(blocks), str(index))

    def send(self, number: int, pieces: Sequence[WeightPiece], seen: Seen) -> int:
        """Raises StalledError where a reader does not read."""
        del number
        group = self._group = self._group or self._meeting.join(self._index, 0)
        parts = parts_of(pieces, self.opened.blocks, self._meeting.bucket_bytes)
        names = torch.frombuffer(bytearray(listed([part.entry for part in parts])), dtype=torch.uint8)
        for head in (torch.tensor([len(names)]), names):
            group.start(head.to(self._meeting.device.torch), 0)()
        under_way: deque[Callable[[], None]] = deque()
        start = 0
        for number, entries in enumerate(grouped((part.entry for part in parts), self._meeting.bucket_bytes)):
            if len(under_way) == len(self._packed):
                under_way.popleft()()
            bucket = parts[start : start + len(entries)]
            start += len(entries)
            memory = _as_it_lies(bucket, self._meeting.device)
            if memory is None:
                size = _size(entries)
                if len(self._packed[number % 2]) < size:
                    self._packed[number % 2] = self._meeting.tensor(max(size, self._meeting.bucket_bytes))
                memory, at = self._packed[number % 2][:size], 0
                for piece, entry, _ in bucket:
                    write(piece, read(entry, memory[at : at + entry.size]))
                    at += entry.nbytes
            under_way.append(group.start(memory, 0))
            for part in bucket:
                if part.ends is not None:
                    seen(part.ends)
        for wait in under_way:
            wait()
        return sum(part.entry.size for part in parts)

    def close(self) -> None:
        self._group = None


class CollectiveReader:
    """Implements transport.Reader. place: among the readers, from 1 on."""

    def __init__(self, meeting: Meeting, ranks: Sequence[int], place: int) -> None:
        self._meeting, self._ranks, self._place = meeting, tuple(ranks), place
        self._joined: dict[int, Broadcasts] = {}
        self._memory = [meeting.tensor(0)] * 2  # of every other bucket

    def source(self, number: int) -> CollectiveSource:
        del number
        return CollectiveSource(self)

    @property
    def meeting(self) -> Meeting:
        return self._meeting

    def memory(self, size: int) -> list[Tensor]:
        """Of two buckets, each at least so large: the same for each publish, since pages that are new cost as much as a copy."""
        if len(self._memory[0]) < size:
            self._memory = [self._meeting.tensor(size) for _ in range(2)]
        return self._memory

    def groups(self) -> Iterator[Broadcasts]:
        """Of each rank, in order; joined when it is first asked for."""
        for rank in self._ranks:
            if rank not in self._joined:
                self._joined[rank] = self._meeting.join(rank, self._place)
            yield self._joined[rank]

    def __reduce__(self) -> tuple[type[CollectiveReader], tuple[Meeting, tuple[int, ...], int]]:
        return CollectiveReader, (self._meeting, self._ranks, self._place)


class CollectiveSource:
    """Implements ports.WeightSource, once: what is broadcast is gone. Waiting for it blocks."""

    shared = False

    def __init__(self, reader: CollectiveReader) -> None:
        self._reader = reader
        self._found: list[list[Entry]] = []

    def _lists(self) -> list[list[Entry]]:
        """Of each rank. Raises StalledError where one does not send."""
        meeting = self._reader.meeting
        for group in self._reader.groups() if not self._found else ():
            length = meeting.tensor(1, torch.int64)
            group.start(length, 0)()
            names = meeting.tensor(int(length))
            group.start(names, 0)()
            self._found.append(unlisted(names.cpu().numpy().tobytes()))
        return self._found

    @property
    def blocks(self) -> tuple[WeightBlock, ...]:
        return tuple(entry.block for entries in self._lists() for entry in entries)

    def shards(self) -> Iterator[WeightPiece]:
        """A piece is there until the next one is asked for. Raises StalledError where a rank goes away."""
        meeting = self._reader.meeting
        for group, entries in zip(self._reader.groups(), self._lists(), strict=True):
            buckets = grouped(entries, meeting.bucket_bytes)
            memory = self._reader.memory(max(map(_size, buckets), default=0))
            arriving: deque[Callable[[], None]] = deque()
            for number, bucket in enumerate(buckets):
                for ahead in range(number + len(arriving), min(number + 2, len(buckets))):
                    arriving.append(group.start(memory[ahead % 2][: _size(buckets[ahead])], 0))
                arriving.popleft()()
                at = 0
                for entry in bucket:
                    yield read(entry, memory[number % 2][at : at + entry.size])
                    at += entry.nbytes


class Collective:
    """Implements transport.Transport. host: of this machine, as ranks and engines reach it."""

    name: ClassVar[str] = "collective"
    moves: ClassVar[bool] = True
    far: ClassVar[bool] = True
    meets: ClassVar[bool] = True

    def __init__(self, host: str, where: Device, bucket_bytes: int, limit_s: float) -> None:
        self._host, self._device, self._bucket_bytes, self._limit_s = host, where, bucket_bytes, limit_s
        self._sets = 0

    @cached_property
    def _store(self) -> TCPStore:
        return device.open_store(self._host, self._limit_s)

    def outlet(self, readers: int) -> Outlet:
        self._sets += 1
        address = Address(self._host, self._store.port)
        name = f"weights for set {self._sets} of readers"
        self._meeting = Meeting(address, name, readers, self._device, self._bucket_bytes, self._limit_s)
        return partial(CollectiveSender, self._meeting)

    def readers(self, opened: Sequence[OpenedWeights]) -> Sequence[CollectiveReader]:
        ranks = [int(each.at) for each in opened]
        return [CollectiveReader(self._meeting, ranks, 1 + i) for i in range(self._meeting.readers)]

    def close(self) -> None:
        vars(self).pop("_store", None)


def _size(bucket: Sequence[Entry]) -> int:
    """Bytes of a bucket: the last piece is not followed by anything."""
    return sum(entry.nbytes for entry in bucket[:-1]) + bucket[-1].size


def _as_it_lies(bucket: Sequence[Part], where: Device) -> Tensor | None:
    """The bytes of a single shard that needs neither a copy nor a cast."""
    (piece, entry, _), *others = bucket
    if others or not isinstance(piece, WeightShard):
        return None
    tensor = piece.tensor.detach()
    fits = tensor.dtype == entry.block.dtype and tensor.device.type == where.kind and tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8) if fits else None
