"""Through torch.distributed, to any machine: each rank sends what it holds to all readers, bucket by bucket.

A rank and the readers are a group of their own, so that no rank is sent what another one holds, and the ranks of a sharded model
send at once. Which blocks come in which order is known since the group was made. Before each bucket comes a head that says of each
of its entries how many bytes changed, or that it comes whole, so that a rank sends while it still compares; the next bucket is on
its way while the last is used. Large pieces of a bucket go one by one, from where they lie to where they are to be; small ones, and
what has to be cast, are laid side by side. When readers come or go the groups are made anew, under another name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import count, takewhile
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] documented there

from tandem import device
from tandem.checkpoint.packing import Entry, Part, buckets, cut, read, write
from tandem.checkpoint.transport import Outlet, Seen, this_host
from tandem.device import Address, Broadcasts, Device
from tandem.weights import OpenedWeights, Room, WeightBlock, WeightPiece, WeightShard, nowhere

_ENTRIES = 256  # of a head, and so of a bucket at most
_WHOLE, _END = -1, -2
_LARGE_BYTES = 1 << 18


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


class Memory:
    """Of every other bucket: the same for each publish, since pages that are new cost as much as a copy."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._held = meeting, [meeting.tensor(0)] * 2

    def of(self, number: int, bucket: Sequence[Entry]) -> Tensor:
        """As large as that bucket."""
        size = sum(entry.nbytes for entry in bucket)
        if len(self._held[number % 2]) < size:
            self._held[number % 2] = self._meeting.tensor(max(size, self._meeting.bucket_bytes))
        return self._held[number % 2][:size]


class CollectiveSender:
    """Implements transport.Sender."""

    def __init__(self, meeting: Meeting, index: int, blocks: Sequence[WeightBlock]) -> None:
        self._meeting, self._index, self._memory = meeting, index, Memory(meeting)
        self._group: Broadcasts | None = None
        self.opened = OpenedWeights(this_host(), tuple(blocks), str(index))

    def send(self, number: int, pieces: Iterable[WeightPiece], seen: Seen) -> int:
        """Raises StalledError where a reader does not read."""
        del number
        group = self._group = self._group or self._meeting.join(self._index, 0)
        under_way, sent = deque[list[Callable[[], None]]](), 0
        for number, bucket in enumerate(buckets(pieces, self.opened.blocks, self._meeting.bucket_bytes, _ENTRIES)):
            if len(under_way) == 2:
                for wait in under_way.popleft():
                    wait()
            entries = [part.entry for part in bucket]
            head = [_WHOLE if each.changes is None else each.changes for each in entries] + [_END] * (_ENTRIES - len(entries))
            waits = [group.start(torch.tensor(head, device=self._meeting.device.torch))]
            under_way.append(waits)
            for together, memory in _runs(entries, self._memory.of(number, entries)):
                parts = bucket[together]
                lying = _as_it_lies(parts, self._meeting.device)
                if lying is not None:
                    waits.append(group.start(lying.view(-1).view(torch.uint8)))
                    seen(parts[0].place, lying)
                else:
                    for (place, piece, _), into in zip(parts, _laid(entries[together], memory), strict=True):
                        write(piece, into, partial(seen, place))
                    waits.append(group.start(memory))
            sent += sum(entry.size for entry in entries)
        for waits in under_way:
            for wait in waits:
                wait()
        return sent

    def close(self) -> None:
        self._group = None


class CollectiveReader:
    """Implements transport.Reader. ranks: of the trainer, with what each sends. place: among the readers, from 1 on."""

    def __init__(self, meeting: Meeting, ranks: Mapping[int, tuple[WeightBlock, ...]], place: int) -> None:
        self._meeting, self._ranks, self._place = meeting, ranks, place
        self._joined: dict[int, Broadcasts] = {}
        self._memory = Memory(meeting)

    def source(self, number: int) -> CollectiveSource:
        del number
        return CollectiveSource(self)

    @property
    def blocks(self) -> tuple[WeightBlock, ...]:
        return tuple(block for blocks in self._ranks.values() for block in blocks)

    def arriving(self, room: Room) -> Iterator[WeightPiece]:
        """From each rank, in order; its group is joined when it is first asked for."""
        for rank, blocks in self._ranks.items():
            if rank not in self._joined:
                self._joined[rank] = self._meeting.join(rank, self._place)
            yield from self._of(self._joined[rank], blocks, room)

    def _of(self, group: Broadcasts, blocks: Sequence[WeightBlock], room: Room) -> Iterator[WeightPiece]:
        """While a bucket is used the next one is on its way, and the head of the one after it."""
        coming, arriving = deque(blocks), deque[list[tuple[Callable[[], None], list[Entry], Tensor]]]()
        head = self._meeting.tensor(_ENTRIES, torch.int64)

        def announced() -> Iterator[Entry]:
            for changes in takewhile(lambda each: each != _END, cast("list[int]", head.tolist())):
                block = coming.popleft()
                if changes == _WHOLE:
                    block, *others = cut(block, self._meeting.bucket_bytes)
                    coming.extendleft(reversed(others))
                yield Entry(block, None if changes == _WHOLE else changes)

        def received(number: int, bucket: list[Entry]) -> Iterator[tuple[Callable[[], None], list[Entry], Tensor]]:
            """Begun: what is to be waited for, then which pieces lie in which memory."""
            for together, memory in _runs(bucket, self._memory.of(number, bucket)):
                entries = bucket[together]
                there = _where_it_stays(entries, room, self._meeting.device)
                if there is not None:
                    yield group.start(there.view(-1).view(torch.uint8)), [], memory
                else:
                    yield group.start(memory), entries, memory

        headed = group.start(head) if coming else None
        for number in count():
            if headed is not None:
                headed()
                arriving.append(list(received(number, list(announced()))))
                headed = group.start(head) if coming else None
            if not arriving:
                return
            if len(arriving) == 2 or headed is None:
                for arrived, entries, memory in arriving.popleft():
                    arrived()
                    yield from _laid(entries, memory)

    def __reduce__(self) -> tuple[Callable[..., CollectiveReader], tuple[Meeting, _Ranks, int]]:
        return _arrived, (self._meeting, tuple(self._ranks.items()), self._place)


_Ranks = tuple[tuple[int, tuple[WeightBlock, ...]], ...]


@lru_cache(1)
def _arrived(meeting: Meeting, ranks: _Ranks, place: int) -> CollectiveReader:
    """The one of this process, which is in the ranks' groups already."""
    return CollectiveReader(meeting, dict(ranks), place)


class CollectiveSource:
    """Implements ports.WeightSource, once: what is broadcast is gone. Waiting for it blocks. May travel before."""

    shared = False

    def __init__(self, reader: CollectiveReader) -> None:
        self._reader, self.blocks = reader, reader.blocks

    def shards(self, room: Room = nowhere) -> Iterator[WeightPiece]:
        """A piece is there until the next one is asked for. Raises StalledError where a rank goes away."""
        return self._reader.arriving(room)

    def __reduce__(self) -> tuple[type[CollectiveSource], tuple[CollectiveReader]]:
        return CollectiveSource, (self._reader,)


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
        ranks = {int(each.at): each.blocks for each in opened}
        return [CollectiveReader(self._meeting, ranks, 1 + i) for i in range(self._meeting.readers)]

    def close(self) -> None:
        vars(self).pop("_store", None)


def _runs(bucket: Sequence[Entry], memory: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Which pieces are sent together, with their part of the bucket's memory; the same on both ends."""
    start = at = 0
    for end in range(1, len(bucket) + 1):
        if end < len(bucket) and max(bucket[end - 1].size, bucket[end].size) < _LARGE_BYTES:
            continue
        last = at + sum(entry.nbytes for entry in bucket[start : end - 1])
        yield slice(start, end), memory[at : last + bucket[end - 1].size]
        start, at = end, last + bucket[end - 1].nbytes


def _laid(entries: Sequence[Entry], memory: Tensor) -> Iterator[WeightPiece]:
    """One behind the other."""
    at = 0
    for entry in entries:
        yield read(entry, memory[at : at + entry.size])
        at += entry.nbytes


def _as_it_lies(parts: Sequence[Part], where: Device) -> Tensor | None:
    """A single large shard that needs neither a copy nor a cast."""
    (_, piece, entry), *others = parts
    if others or entry.size < _LARGE_BYTES or not isinstance(piece, WeightShard):
        return None
    tensor = piece.tensor.detach()
    return tensor if tensor.dtype == entry.block.dtype and _may_be_sent(tensor, where) else None


def _where_it_stays(entries: Sequence[Entry], room: Room, where: Device) -> Tensor | None:
    """The room for a single large shard."""
    entry, *others = entries
    if others or entry.size < _LARGE_BYTES or entry.changes is not None:
        return None
    tensor = room(entry.block)
    return tensor if tensor is not None and _may_be_sent(tensor, where) else None


def _may_be_sent(tensor: Tensor, where: Device) -> bool:
    return tensor.device.type == where.kind and tensor.is_contiguous()
