"""Values on their way to another process of this machine: small ones are bytes, what is big goes through shared memory.

A value is pickled with its tensors and arrays left out; those lie in a segment (a memfd, so that nothing is left of it
when the last process that maps it dies), and the receiver reads them where they are. A segment is used again when every
receiver has let go of what it got, which both sides see in the segment itself: neither side maps memory twice, since fresh
pages cost several times the copy.

Layout of a segment:   one byte a holder (1 while it holds)  |  int64 sizes of the pieces  |  pieces, each aligned

Who sends is the holder 0 while a parcel is open; each link is another. What is received is shared and not to be written in
place: other receivers of the same parcel see the same pages. Tensors travel without their gradient history, and only
those on the host.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import threading
import weakref
from collections.abc import Collection, Sequence
from itertools import accumulate
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
_HOLDERS = 4096
_ALIGN = 64
_KEEP_BYTES = 512 << 20  # of free segments; more is given back
_UNREADABLE = (pickle.UnpicklingError, ImportError, AttributeError, LookupError, EOFError, TypeError, ValueError)
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.device.type != "cpu":
        raise WorkerError(f"a tensor on {tensor.device} cannot be sent to another process; send tensor.cpu() or its rows' handle")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return _rebuild, (pickle.PickleBuffer(flat.numpy().data), tensor.dtype, tuple(tensor.shape))


def _rebuild(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


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


class Parcel:
    """A pickled value, and the segment that holds what was left out of it. `close` when it has been handed to all links."""

    def __init__(self, head: bytes, pieces: Sequence[pickle.PickleBuffer], outbox: Outbox) -> None:
        self.head = head
        self._pieces: list[Any] = [head, *(piece.raw() for piece in pieces)]
        self.num_pieces = len(self._pieces)
        small = not pieces and len(head) <= INLINE_BYTES
        self.num_bytes = 0 if small else sum(len(piece) for piece in self._pieces)
        self.segment = None if small else outbox.take(_places([len(piece) for piece in self._pieces])[-1])

    def fill(self) -> None:
        """Copies the pieces into the segment; blocks, and other threads run meanwhile."""
        if self.segment is None:
            return
        sizes = np.array([len(piece) for piece in self._pieces], np.int64)
        self.segment.bytes[_HOLDERS : _HOLDERS + sizes.nbytes] = sizes.view(np.uint8)
        for start, piece in zip(_places(sizes.tolist()), self._pieces, strict=False):
            self.segment.bytes[start : start + len(piece)] = np.frombuffer(piece, np.uint8)

    def close(self) -> None:
        self._pieces.clear()
        if self.segment is not None:
            self.segment.bytes[0] = 0


def _places(sizes: Sequence[int]) -> list[int]:
    """Where each piece starts, and where the last one ends."""

    def aligned(size: int) -> int:
        return -(-size // _ALIGN) * _ALIGN

    return list(accumulate((aligned(size) for size in sizes), initial=_HOLDERS + aligned(8 * len(sizes))))


class Outbox:
    """The segments that this process sends, for all its links. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._made = 0
        self._links = {0}

    def pack(self, value: object) -> Parcel:
        """`value`, pickled; its big parts are copied by `Parcel.fill`. Raises what pickle raises for what it cannot pickle."""
        return Parcel(*pickled(value), self)

    def take(self, size: int) -> Segment:
        """A segment of at least `size` bytes that nobody holds, now held by its sender."""
        with self._lock:
            free = [segment for segment in self._segments.values() if not segment.bytes[:_HOLDERS].any()]
            fitting = [segment for segment in free if segment.capacity >= size]
            found = min(fitting, key=lambda segment: segment.capacity, default=None)
            if found is None or found.capacity > max(4 * size, 1 << 20):
                self._trim(free, size)
                found = self._make(1 << (size - 1).bit_length())
                self._segments[found.ident] = found
            found.bytes[0] = 1
            return found

    def _make(self, capacity: int) -> Segment:
        fd = os.memfd_create("tandem")
        os.ftruncate(fd, capacity)
        self._made += 1
        return Segment(self._made, capacity, fd)

    def _trim(self, free: list[Segment], size: int) -> None:
        """Oldest first, until what is free and what is wanted is no more than we keep."""
        spare = size + sum(segment.capacity for segment in free)
        for segment in free:
            if spare <= _KEEP_BYTES:
                return
            spare -= segment.capacity
            os.close(self._segments.pop(segment.ident).fd)

    def gone(self, known: Collection[int]) -> tuple[int, ...]:
        """Those of `known` segments that are no longer sent."""
        with self._lock:
            return tuple(ident for ident in known if ident not in self._segments)

    def join(self) -> int:
        """A new link's holder number."""
        with self._lock:
            number = next(number for number in range(_HOLDERS) if number not in self._links)
            self._links.add(number)
            return number

    def leave(self, number: int) -> None:
        """The link is closed: what its other end held is free."""
        with self._lock:
            self._links.discard(number)
            for segment in self._segments.values():
                segment.bytes[number] = 0


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

    def pieces(self, ident: int, count: int, holder: int) -> list[memoryview]:
        """What lies in a segment; `holder` lets go of it when the last view of any piece is gone.

        Raises WorkerError for a segment that did not arrive.
        """
        if ident not in self._segments:
            raise WorkerError("a message came without its shared memory: this process may open no more files; raise `ulimit -n`")
        segment = self._segments[ident]
        lent = segment.bytes.view()
        weakref.finalize(lent, _let_go, segment.bytes, holder).atexit = False
        shared = lent.data
        sizes = np.frombuffer(shared[_HOLDERS : _HOLDERS + 8 * count], np.int64).tolist()
        return [shared[start : start + size] for start, size in zip(_places(sizes), sizes, strict=False)]


def _let_go(segment: Bytes, holder: int) -> None:
    segment[holder] = 0


def unpack(head: bytes | memoryview, pieces: Sequence[memoryview | Bytes]) -> Any:
    """Inverse of `pickled`; the value's tensors lie in the pieces. Raises WorkerError where this process cannot make the value."""
    try:
        return pickle.loads(head, buffers=pieces)
    except _UNREADABLE as error:
        raise WorkerError(f"what another process sent cannot be read here: {type(error).__name__}: {error}") from error
