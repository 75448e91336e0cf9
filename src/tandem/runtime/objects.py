"""Values on their way through Ray: small ones travel in the call, what is big lies in the object store of a node.

A value is pickled with its tensors and arrays left out (parcels.pickled); Ray copies those into the store once, and every
receiver on that node reads them where they are. What is received is therefore shared and not to be written in place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeAlias

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError

from tandem.errors import WorkerError
from tandem.runtime.link import portable, restored
from tandem.runtime.parcels import UNPICKLABLE, Bytes, pickled, unpack

Actor: TypeAlias = Any  # a handle of a Ray actor, whose methods no type checker sees
Ref: TypeAlias = Any  # ray.ObjectRef
Packed: TypeAlias = tuple[bytes, list[Bytes]]  # a pickle, and what was left out of it
Answer: TypeAlias = tuple[bool, Packed]  # whether it is a result and not an exception

untyped: Any = ray  # its own annotations are partial

_IN_THE_CALL_BYTES = 100 << 10  # as much as Ray itself leaves in a call
_IN_A_THREAD_BYTES = 1 << 20


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


async def stored(value: Packed) -> Packed | Ref:
    """What to give to any number of calls. Raises WorkerError where the store has no room for it."""
    head, pieces = value
    size = len(head) + sum(piece.nbytes for piece in pieces)
    try:
        if size > _IN_A_THREAD_BYTES:
            return await asyncio.to_thread(untyped.put, value)
        return untyped.put(value) if size > _IN_THE_CALL_BYTES else value
    except RayError as error:
        raise WorkerError(f"{size >> 20} MB cannot be put into Ray's object store: {error}") from error


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
