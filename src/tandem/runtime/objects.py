"""Values on their way through Ray: small ones travel in the call, what is big lies in the object store of a node.

A value is pickled with its tensors and arrays left out (parcels.pickled); Ray copies those into the store once, and every
receiver on that node reads them where they are. What is received is therefore shared and not to be written in place. Columns
that were joined in the store (`shared`) go as their place there.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Sequence
from typing import Any, TypeAlias

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayError
from torch import Tensor

from tandem.errors import WorkerError
from tandem.runtime.link import portable, restored
from tandem.runtime.parcels import UNPICKLABLE, Bytes, pickled, unpack

Actor: TypeAlias = Any  # a handle of a Ray actor, whose methods no type checker sees
Ref: TypeAlias = Any  # ray.ObjectRef
Packed: TypeAlias = tuple[bytes, list[Bytes]]  # a pickle, and what was left out of it
Place: TypeAlias = tuple[int, int, int]  # of a piece in the store: which object, where it starts, how long it is
Answer: TypeAlias = tuple[bool, Packed]  # whether it is a result and not an exception

untyped: Any = ray  # its own annotations are partial

_IN_THE_CALL_BYTES = 100 << 10  # as much as Ray itself leaves in a call
_IN_A_THREAD_BYTES = 1 << 20


class _Kept:
    """Memory of this process that lies in the object store, by its place. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is forgotten may be forgotten in the middle of anything
        self._refs: dict[int, tuple[int, Ref]] = {}  # address -> size, reference

    def keep(self, data: Bytes) -> Bytes:
        """A copy of `data` in the store; it leaves the store when the last view of it is gone."""
        ref = untyped.put(data)
        copy = np.asarray(_Writable(untyped.get(ref)))
        address = copy.ctypes.data
        with self._lock:
            self._refs[address] = copy.nbytes, ref
        weakref.finalize(copy, self._forget, address).atexit = False
        return copy

    def _forget(self, address: int) -> None:
        with self._lock:
            del self._refs[address]

    def home(self, piece: Bytes) -> tuple[Ref, int] | None:
        """Where in the store these bytes lie, if they do: object and offset."""
        address = piece.ctypes.data
        with self._lock:
            for start, (size, ref) in list(self._refs.items()):
                if start <= address < start + size:
                    return ref, address - start
        return None


_kept = _Kept()


def shared(parts: Sequence[Tensor]) -> Tensor:
    """Tensors as one, in the object store, from where workers get it without a copy: joins the rows of a queue that is served.

    Like torch.cat where they are small, or not on the host.
    """
    joined = torch.cat(list(parts)).detach()
    if joined.device.type != "cpu" or joined.nbytes <= _IN_THE_CALL_BYTES:
        return joined
    kept = _kept.keep(joined.reshape(-1).view(torch.uint8).numpy())
    return torch.frombuffer(kept, dtype=joined.dtype).view(joined.shape)


def packed(value: object) -> Packed:
    """Raises WorkerError for what has no pickle."""
    try:
        head, pieces = pickled(value)
    except UNPICKLABLE as error:
        raise WorkerError(f"this cannot be sent to another process: {error}") from error
    return head, [np.frombuffer(piece.raw(), np.uint8) for piece in pieces]


def unpacked(value: Packed) -> Any:
    """Inverse of `packed`."""
    head, pieces = value
    return unpack(head, [np.asarray(_Writable(piece)) for piece in pieces])


class _Writable:
    """The memory of a read-only array without that mark, of which torch would warn: it has no read-only tensors."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


async def stored(value: Packed) -> tuple[Any, ...]:
    """What to give to any number of calls; what arrives is for `received`. Raises WorkerError where the store has no room for it.

    Nothing is copied that lies in the store already.
    """
    head, pieces = value
    places: list[Bytes | Place] = []
    refs: list[Ref] = []
    for piece in pieces:
        if (home := _kept.home(piece)) is None:
            places.append(piece)
            continue
        ref, start = home
        if ref not in refs:
            refs.append(ref)
        places.append((refs.index(ref), start, piece.nbytes))
    size = len(head) + sum(place.nbytes for place in places if not isinstance(place, tuple))
    try:
        if size > _IN_A_THREAD_BYTES:
            return await asyncio.to_thread(_put, (head, places)), *refs
        return _put((head, places)) if size > _IN_THE_CALL_BYTES else (head, places), *refs
    except RayError as error:
        raise WorkerError(f"{size >> 20} MB cannot be put into Ray's object store: {error}") from error


def received(value: tuple[bytes, list[Bytes | Place]], kept: Sequence[Bytes]) -> Packed:
    """Inverse of `stored`, at the other end of a call."""
    head, places = value
    return head, [kept[place[0]][place[1] : place[1] + place[2]] if isinstance(place, tuple) else place for place in places]


def _put(value: tuple[bytes, list[Bytes | Place]]) -> Ref:
    return untyped.put(value)


async def answer(work: Awaitable[object]) -> Answer:
    """What `work` gives, or its exception; nothing where nobody wants it any more."""
    try:
        return True, packed(await work)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return False, packed(portable(error))
    except Exception as error:  # noqa: BLE001 the asker's to handle
        return False, packed(portable(error))


def opened(given: Answer) -> Any:
    """The result, or raises what was raised."""
    fine, value = given
    if fine:
        return unpacked(value)
    raise restored(*unpacked(value))


async def result(ref: Ref) -> Any:
    """Of an actor's call that gives an Answer. Raises ConnectionError where the actor is gone, WorkerError where Ray failed."""
    try:
        return opened(await ref)
    except RayActorError as error:
        raise ConnectionError(str(error)) from error
    except RayError as error:
        raise WorkerError(f"Ray did not bring the answer: {error}") from error
