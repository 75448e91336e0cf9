"""Values on their way to another process of this machine: small ones are bytes, what is big goes through shared memory.

A value is pickled with its tensors and arrays left out; those lie in segments (memfds, so that nothing is left of one when
the last process that maps it dies), and the receiver reads them where they are. A tensor that was made in a segment (`empty`)
goes as its place there; others are copied into the parcel's own segment. A segment is used again when everybody has let go of
it, which both sides see in the segment itself: neither side maps memory twice, since fresh pages cost several times the copy.

Layout of a segment:   one byte a loan (1 while it is held)  |  for a parcel: where its pieces lie  |  pieces, each aligned

Loan 0 is the sender's own, while a parcel is open or a tensor is there; each message that shows the segment has another. What
is received is shared and not to be written in place: other receivers see the same pages. Tensors travel without their gradient
history, and only those on the host; those on the meta device are a shape.
"""

from __future__ import annotations

import copyreg
import io
import math
import os
import pickle
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, count
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.errors import WorkerError
from tandem.types import Key

Bytes: TypeAlias = NDArray[np.uint8]

INLINE_BYTES = 32 << 10  # pickles up to this size travel in the message itself
_LEAVE_OUT_BYTES = 4 << 10  # tensors and arrays from this size on are left out of the pickle
_LOANS = 4096
_PLACE_BYTES = 24  # segment, start and size of a piece
_ALIGN = 64
_SHARED_BYTES = 64 << 10  # from this size on a tensor gets a segment, and with it a descriptor
_MAX_OTHERS = 200  # segments in one message: the kernel takes 253 descriptors
_KEEP_BYTES = 512 << 20  # of free segments; more is given back
_UNREADABLE = (pickle.UnpicklingError, ImportError, AttributeError, LookupError, EOFError, TypeError, ValueError)
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.device.type == "meta":  # a shape without numbers
        return _rebuild_shape, (tuple(tensor.shape), tensor.dtype)
    if tensor.device.type != "cpu":
        raise WorkerError(f"a tensor on {tensor.device} cannot be sent to another process; send tensor.cpu() or its rows' handle")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return _rebuild, (pickle.PickleBuffer(flat.numpy().data), tensor.dtype, tuple(tensor.shape))


def _rebuild(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def _rebuild_shape(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _reduce_key(key: Key) -> tuple[Any, ...]:
    """As the pickle module would in the end, in a third of its time."""
    return Key, tuple(key)


_DISPATCH = {**copyreg.dispatch_table, Tensor: _reduce, torch.nn.Parameter: _reduce, Key: _reduce_key}


class _Pickler(pickle.Pickler):
    dispatch_table = _DISPATCH


def pickled(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """`value` as a pickle, and its big tensors and arrays, which are left out of it and not copied; `unpack` is the inverse.

    Raises one of UNPICKLABLE for what has no pickle.
    """
    pieces: list[pickle.PickleBuffer] = []

    def inside(piece: pickle.PickleBuffer) -> bool:
        if piece.raw().nbytes < _LEAVE_OUT_BYTES:
            return True
        pieces.append(piece)
        return False

    head = io.BytesIO()
    _Pickler(head, 5, buffer_callback=inside).dump(value)
    return head.getvalue(), pieces


class Segment:
    """Shared memory, mapped once in this process: from `fd`, which stays its owner's."""

    def __init__(self, ident: int, capacity: int, fd: int) -> None:
        self.ident = ident
        self.capacity = capacity
        self.fd = fd
        mapped = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=capacity, dtype=torch.uint8)  # mmap would keep fd
        self.bytes: Bytes = mapped.numpy()
        self.address: int = mapped.data_ptr()

    def shown(self, loan: int) -> memoryview:
        """The memory; when the last view of it is gone, `loan` is let go."""
        lent = self.bytes.view()
        weakref.finalize(lent, _let_go, self.bytes, loan).atexit = False
        return lent.data


def _let_go(segment: Bytes, loan: int) -> None:
    segment[loan] = 0


class Parcel:
    """A pickled value, and the segments that hold what was left out of it. `close` when it has been handed to all links.

    segment: its own, if it has one. others: those in which tensors of the value were made.
    """

    def __init__(self, head: bytes, pieces: Sequence[pickle.PickleBuffer], outbox: Outbox) -> None:
        self.head = head
        self._pieces = [memoryview(head), *(piece.raw() for piece in pieces)]
        self.num_pieces = len(self._pieces)
        self._homes = [None, *(outbox.home(piece) for piece in self._pieces[1:])]
        self.others = list({home.ident: home for home in self._homes if home}.values())
        if len(self.others) > _MAX_OTHERS:
            self.others, self._homes = [], [None] * self.num_pieces
        self._copied = [i for i, home in enumerate(self._homes) if home is None]
        small = not pieces and len(head) <= INLINE_BYTES
        self.num_bytes = 0 if small else sum(len(self._pieces[i]) for i in self._copied)
        self.segment = None if small else outbox.take(self._starts()[-1])

    def _starts(self) -> list[int]:
        """Where each piece that is copied starts, and where the last one ends."""
        sizes = (len(self._pieces[i]) for i in self._copied)
        return list(accumulate(map(_aligned, sizes), initial=_LOANS + _aligned(_PLACE_BYTES * self.num_pieces)))

    def fill(self) -> None:
        """Copies the pieces into the segment; blocks, and other threads run meanwhile."""
        if self.segment is None:
            return
        starts = dict(zip(self._copied, self._starts(), strict=False))
        places = np.empty((self.num_pieces, 3), np.int64)
        for i, (piece, home) in enumerate(zip(self._pieces, self._homes, strict=True)):
            data = np.frombuffer(piece, np.uint8)
            if home is None:
                self.segment.bytes[starts[i] : starts[i] + data.nbytes] = data
                places[i] = self.segment.ident, starts[i], data.nbytes
            else:
                places[i] = home.ident, data.ctypes.data - home.address, data.nbytes
        self.segment.bytes[_LOANS : _LOANS + places.nbytes] = places.reshape(-1).view(np.uint8)

    def close(self) -> None:
        self._pieces.clear()
        if self.segment is not None:
            self.segment.bytes[0] = 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class Outbox:
    """The segments that this process sends, for all its links. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._by_address: list[tuple[int, Segment]] = []
        self._made = 0
        self._links = {0}
        self._lent: dict[int, dict[int, int]] = {}  # segment -> loan -> link

    def pack(self, value: object) -> Parcel:
        """`value`, pickled; its big parts are copied by `Parcel.fill`. Raises what pickle raises for what it cannot pickle."""
        return Parcel(*pickled(value), self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in shared memory if it is big, so that sending it, or rows of it, copies nothing."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SHARED_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        memory = self.take(_LOANS + size).shown(0)
        return torch.frombuffer(memory[_LOANS : _LOANS + size], dtype=dtype).view(tuple(shape))

    def take(self, size: int) -> Segment:
        """A segment of at least `size` bytes that nobody holds, now held by its sender."""
        with self._lock:
            free = [segment for segment in self._segments.values() if not segment.bytes[:_LOANS].any()]
            fitting = [segment for segment in free if segment.capacity >= size]
            found = min(fitting, key=lambda segment: segment.capacity, default=None)
            if found is None or found.capacity > max(4 * size, 1 << 20):
                self._trim(free, size)
                found = self._make(1 << (size - 1).bit_length())
            found.bytes[0] = 1
            return found

    def _make(self, capacity: int) -> Segment:
        fd = os.memfd_create("tandem")
        os.ftruncate(fd, capacity)
        self._made += 1
        made = self._segments[self._made] = Segment(self._made, capacity, fd)
        self._lent[made.ident] = {}
        insort(self._by_address, (made.address, made), key=itemgetter(0))
        return made

    def _trim(self, free: list[Segment], size: int) -> None:
        """Oldest first, until what is free and what is wanted is no more than we keep."""
        spare = size + sum(segment.capacity for segment in free)
        for segment in free:
            if spare <= _KEEP_BYTES:
                return
            spare -= segment.capacity
            os.close(segment.fd)
            del self._segments[segment.ident], self._lent[segment.ident]
            self._by_address.remove((segment.address, segment))

    def home(self, piece: memoryview) -> Segment | None:
        """The segment in which these bytes lie."""
        address = np.frombuffer(piece, np.uint8).ctypes.data
        with self._lock:
            i = bisect_right(self._by_address, address, key=itemgetter(0))
            if i == 0:
                return None
            segment = self._by_address[i - 1][1]
        return segment if address < segment.address + segment.capacity else None

    def lend(self, segment: Segment, link: int) -> int:
        """A loan for a message over a link."""
        with self._lock:
            loan = 1 + int(segment.bytes[1:_LOANS].argmin())
            if segment.bytes[loan]:
                raise WorkerError(
                    f"{_LOANS - 1} messages hold the same {segment.capacity >> 20} MB of shared memory: who keeps them?"
                )
            segment.bytes[loan] = 1
            self._lent[segment.ident][loan] = link
            return loan

    def gone(self, known: Collection[int]) -> tuple[int, ...]:
        """Those of `known` segments that are no longer sent."""
        with self._lock:
            return tuple(ident for ident in known if ident not in self._segments)

    def join(self) -> int:
        """A new link's number."""
        with self._lock:
            number = next(number for number in count() if number not in self._links)
            self._links.add(number)
            return number

    def leave(self, number: int) -> None:
        """The link is closed: what its other end held is free."""
        with self._lock:
            self._links.discard(number)
            for ident, loans in self._lent.items():
                for loan in [loan for loan, link in loans.items() if link == number]:
                    self._segments[ident].bytes[loan] = 0
                    del loans[loan]


class Inbox:
    """The segments that one link has received."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def add(self, ident: int, capacity: int, fd: int) -> None:
        """Maps a segment and closes `fd`. Raises WorkerError where there is no room for it."""
        try:
            self._segments[ident] = Segment(ident, capacity, fd)
        except RuntimeError as error:
            raise WorkerError(f"{capacity >> 20} MB of shared memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def forget(self, idents: Collection[int]) -> None:
        for ident in idents:
            self._segments.pop(ident, None)

    def pieces(self, num: int, loans: Mapping[int, int]) -> list[memoryview]:
        """What a parcel left out of its pickle. loans: by segment, the parcel's own first; each is let go when the last view of
        any piece in that segment is gone.

        Raises WorkerError for a segment that did not arrive.
        """
        if not loans.keys() <= self._segments.keys():
            raise WorkerError("a message came without its shared memory: this process may open no more files; raise `ulimit -n`")
        shown = {ident: self._segments[ident].shown(loan) for ident, loan in loans.items()}
        table = shown[next(iter(loans))][_LOANS : _LOANS + _PLACE_BYTES * num]
        places = np.frombuffer(table, np.int64).reshape(num, 3).tolist()
        return [shown[ident][start : start + size] for ident, start, size in places]


def unpack(head: bytes | memoryview, pieces: Sequence[memoryview | Bytes]) -> Any:
    """Inverse of `pickled`; the value's tensors lie in the pieces. Raises WorkerError where this process cannot make the value."""
    try:
        return pickle.loads(head, buffers=pieces)
    except _UNREADABLE as error:
        raise WorkerError(f"what another process sent cannot be read here: {type(error).__name__}: {error}") from error
