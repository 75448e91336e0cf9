"""A TransferQueue for workers in other processes: its owner serves it, and they fetch and write their rows by handle.

Columns travel as parcels: rows that a worker writes stay in the memory where that worker put them, and the owner's rows are
copied once into shared memory for each call that fetches them, or never where a queue made with `join=shared` joined them. The
rules are the queue's own: this only carries calls to the loop of the process that owns it, and what they raise back.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor

from tandem.data_proto import DataProto
from tandem.errors import RunError, WorkerError
from tandem.faults import crash_point
from tandem.ports import Consumer, Lease, TransferQueue
from tandem.runtime.link import Link, Question, outbox
from tandem.types import GroupKey, Key, Metrics, PolicyRef

_METHODS = frozenset(name for name, member in vars(TransferQueue).items() if inspect.isfunction(member) and name[0] != "_")
Asked = tuple[str, tuple[Any, ...], dict[str, Any]]  # method, arguments
_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group


async def perform(queue: TransferQueue, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """A call that was asked of a queue. Raises what the queue raises, and RunError where the port has no such method."""
    if name not in _METHODS:
        raise RunError(f"a TransferQueue has no method {name!r}")
    result = getattr(queue, name)(*args, **kwargs)
    return await cast("Awaitable[object]", result) if inspect.isawaitable(result) else result


def shared(parts: Sequence[Tensor]) -> Tensor:
    """Tensors as one, in memory that is shown to workers without a copy: joins the rows of a queue that is served.

    Like torch.cat where they are small, not on the host, or not of one kind.
    """
    first = parts[0]
    if any((part.dtype, part.device.type, part.shape[1:]) != (first.dtype, "cpu", first.shape[1:]) for part in parts):
        return torch.cat(list(parts))
    out = outbox().empty((sum(len(part) for part in parts), *first.shape[1:]), first.dtype)
    return torch.cat([part.detach() for part in parts], out=out)


class QueueServer:
    """Serves a queue to processes of the same user from the running event loop, for the length of an `async with`."""

    def __init__(self, queue: TransferQueue) -> None:
        self._queue = queue
        self._sessions: set[_Session] = set()
        self.address = f"tandem-{os.getpid()}-{secrets.token_hex(8)}"  # of no file: it goes with the process

    def client(self) -> QueueClient:
        """A client to be sent to other processes; it connects where it is first used, while the queue is served."""
        return QueueClient(self.address)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen()
        self._loop.add_reader(self._listener, self._accept)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for session in self._sessions:
            session.link.close()

    def _accept(self) -> None:
        end, _ = self._listener.accept()
        _, user, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if user != os.getuid():
            end.close()
            return

        self._sessions.add(_Session(self, end))

    def start(self, session: _Session, value: Asked, question: Question) -> None:
        """In the queue's loop."""
        task = asyncio.ensure_future(question.answer(perform(self._queue, *value)))
        session.tasks.add(task)
        task.add_done_callback(session.tasks.discard)

    def forget(self, session: _Session) -> None:
        """A client is gone: what it still waits for must not be given to it. In the queue's loop."""
        self._sessions.discard(session)
        for task in session.tasks:
            task.cancel()


class _Session:
    """One client, as the links' thread sees it."""

    def __init__(self, server: QueueServer, end: socket.socket) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.link = Link(end, self._receive, self._lost)

    def _receive(self, value: Asked, question: Question) -> None:
        self._loop.call_soon_threadsafe(self._server.start, self, value, question)

    def _lost(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._server.forget, self)


class RemoteQueue(ABC):
    """Implements ports.TransferQueue by asking the process that owns the queue, from any process and any event loop of it.

    Raises what the queue raises, and WorkerError where its process is gone. A wait has the queue's own limit.
    """

    @abstractmethod
    async def ask(self, asked: Asked) -> Any:
        """The queue's answer."""

    @abstractmethod
    def _ask_blocking(self, asked: Asked) -> Any:
        """The same, blocking."""

    async def reserve(self, group: GroupKey, n: int) -> tuple[Key, ...]:
        return await self._call("reserve", group, n)

    async def put(self, rows: DataProto) -> None:
        await self._call("put", rows)

    async def write(self, rows: DataProto) -> None:
        await self._call("write", rows)

    async def take(
        self, consumer: Consumer, columns: frozenset[str], n: int, *, window: int = 0, lacking: frozenset[str] = frozenset()
    ) -> Lease:
        return await self._call("take", consumer, columns, n, window=window, lacking=lacking)

    async def release(self, lease: Lease) -> None:
        await self._call("release", lease)

    async def get(self, keys: Sequence[Key], columns: frozenset[str]) -> DataProto:
        return await self._call("get", keys, columns)

    async def ack(self, lease: Lease) -> None:
        await self._call("ack", lease)

    async def drop(self, places: Collection[Key], reason: str) -> None:
        await self._call("drop", tuple(places), reason)

    async def save(self, directory: Path) -> None:
        await self._call("save", directory)

    async def commit(self, snapshot: str) -> None:
        await self._call("commit", snapshot)

    async def restore(self, snapshot: str, directory: Path | None, policy: PolicyRef | None = None) -> None:
        await self._call("restore", snapshot, directory, policy)

    def metrics(self) -> Metrics:
        """Blocks until the queue's process answers: not to be called from the event loop that serves the queue."""
        return self._ask_blocking(("metrics", (), {}))

    async def _call(self, name: str, *args: object, **kwargs: object) -> Any:
        crash_point(f"queue.ask.{name}")
        answer = await self.ask((name, args, kwargs))
        crash_point(f"queue.answered.{name}")
        return answer


class QueueClient(RemoteQueue):
    """A client of a QueueServer; pickles as its address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connected: Link | None = None

    def __reduce__(self) -> tuple[type[QueueClient], tuple[str]]:
        return QueueClient, (self._address,)

    def close(self) -> None:
        if self._connected is not None:
            self._connected.close()

    def connects(self) -> bool:
        """Whether the queue is, or was, served on this machine."""
        try:
            self._link()
        except ConnectionError:
            return False
        return True

    async def ask(self, asked: Asked) -> Any:
        try:
            return await self._link().call(asked)
        except ConnectionError as error:
            raise self._gone() from error

    def _ask_blocking(self, asked: Asked) -> Any:
        try:
            return self._link().call_blocking(asked)
        except ConnectionError as error:
            raise self._gone() from error

    def _link(self) -> Link:
        if self._connected is None:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                end.connect(f"\0{self._address}")
            except ConnectionError:
                end.close()
                raise
            self._connected = Link(end, _asks_nothing)
        return self._connected

    def _gone(self) -> WorkerError:
        return WorkerError(f"the queue at {self._address} is not served any more: its process has ended, or closed it")


def _asks_nothing(value: object, question: Question) -> None:
    question.fail(WorkerError("a client of a queue is asked nothing"))
