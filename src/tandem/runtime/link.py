"""A link between two processes of this machine: either end asks, and the other end answers.

It is a Unix socket whose messages are whole (SOCK_SEQPACKET); values travel as parcels. All links of a process are read
by one thread, so that a question is noticed, and the other end's death too, while the process computes. It knows nothing of
workers or queues.

    ask(value) ----(ask, 7, parcel)----> receive(Question) .. Question.answer(coroutine)
         <-----(done | failed, 7, parcel)---------------------------'
"""

from __future__ import annotations

import asyncio
import atexit
import os
import pickle
import socket
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any, Literal

from tandem.errors import WorkerError
from tandem.runtime.parcels import INLINE_BYTES, UNPICKLABLE, Inbox, Outbox, Parcel, unpack

Kind = Literal["ask", "done", "failed"]
# A pickle; or how many pieces, loans by segment, and of segments whose descriptors come along their capacities.
Body = bytes | tuple[int, dict[int, int], list[tuple[int, int]]]
Frame = tuple[Kind, int, tuple[int, ...], Body]  # kind, number of the question, segments that are gone, body

_FRAME_BYTES = 4 * INLINE_BYTES
_MAX_FDS = 253  # the kernel's own bound
_IN_A_THREAD_BYTES = 1 << 20  # from this size on, a parcel is filled in a thread and the event loop goes on


@cache
def reader() -> asyncio.AbstractEventLoop:
    """The loop of the thread that reads this process's links."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tandem-links", daemon=True)
    thread.start()

    def stop() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    atexit.register(stop)
    return loop


@cache
def outbox() -> Outbox:
    return Outbox()


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def pack(value: object) -> Parcel:
    """A parcel that is ready to go to any number of links; the caller closes it. Raises WorkerError for what has no pickle."""
    parcel = _pickled(value)
    if parcel.num_bytes < _IN_A_THREAD_BYTES:
        parcel.fill()
    else:
        await asyncio.to_thread(parcel.fill)
    return parcel


def packed(value: object) -> Parcel:
    """The same, blocking."""
    parcel = _pickled(value)
    parcel.fill()
    return parcel


def _pickled(value: object) -> Parcel:
    try:
        return outbox().pack(value)
    except UNPICKLABLE as error:
        raise WorkerError(f"this cannot be sent to another process: {error}") from error


def frame(kind: Kind, number: int, body: Body, gone: tuple[int, ...] = ()) -> bytes:
    return pickle.dumps((kind, number, gone, body))


class Question:
    """Something that the other end asked, to be answered once."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number

    async def answer(self, work: Awaitable[object]) -> None:
        """Sends what `work` gives, or its exception; an end that is gone is no error."""
        try:
            parcel = await pack(await work)
            self._link.send("done", self._number, parcel)
            parcel.close()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 the asker's to handle
            self.fail(error)

    def reply(self, value: object) -> None:
        """Sends a value, from any thread."""
        self._send("done", value)

    def fail(self, error: BaseException) -> None:
        """Sends an exception, from any thread."""
        self._send("failed", portable(error))

    def _send(self, kind: Kind, value: object) -> None:
        parcel = packed(value)
        self._link.send(kind, self._number, parcel)
        parcel.close()


class Link:
    """One end. receive: called by the reading thread with each value that is asked; lost: once, when the other end is gone."""

    def __init__(
        self, end: socket.socket, receive: Callable[[Any, Question], None], lost: Callable[[], None] = lambda: None
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._receive = receive
        self._lost = lost
        self._lock = threading.Lock()  # of everything below
        self._number = outbox().join()  # among this process's links
        self._known: set[int] = set()  # segments that the other end has mapped
        self._backlog: deque[tuple[bytes, list[int]]] = deque()
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = count()
        self._open = True
        self._inbox = Inbox()
        reader().call_soon_threadsafe(reader().add_reader, end, self._read)

    # ------------------------------------------------------------------------------------------- sending

    def ask(self, parcel: Parcel, fds: Sequence[int] = ()) -> Future[Any]:
        """The answer, or what the other end raised; ConnectionError where it is gone. Does not close the parcel."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
        if not self.send("ask", number, parcel, fds):
            self._fail(number)
        return future

    async def call(self, value: object, fds: Sequence[int] = ()) -> Any:
        """Asks and waits."""
        parcel = await pack(value)
        answer = self.ask(parcel, fds)
        parcel.close()
        return await asyncio.wrap_future(answer)

    def call_blocking(self, value: object) -> Any:
        """Asks and blocks this thread, which must not be the one that reads links."""
        parcel = packed(value)
        answer = self.ask(parcel)
        parcel.close()
        return answer.result()

    def send(self, kind: Kind, number: int, parcel: Parcel, fds: Sequence[int] = ()) -> bool:
        """False where the other end is gone."""
        with self._lock:
            if not self._open:
                return False
            gone = outbox().gone(self._known)
            self._known -= set(gone)
            body: Body = parcel.head
            copies = [os.dup(fd) for fd in fds]
            if parcel.segment is not None:
                loans = [(each, outbox().lend(each, self._number)) for each in (parcel.segment, *parcel.others)]
                fresh = [each for each, _ in loans if each.ident not in self._known]
                copies += [os.dup(each.fd) for each in fresh]
                self._known.update(each.ident for each in fresh)
                body = (
                    parcel.num_pieces,
                    {each.ident: loan for each, loan in loans},
                    [(each.ident, each.capacity) for each in fresh],
                )
            self._backlog.append((frame(kind, number, body, gone), copies))
            if len(self._backlog) == 1:
                self._flush()
                if self._backlog:
                    reader().call_soon_threadsafe(self._watch)
            return True

    def _flush(self) -> None:
        """Sends what the socket takes now. With the lock."""
        while self._backlog:
            data, fds = self._backlog[0]
            try:
                socket.send_fds(self._socket, [data], fds)
            except BlockingIOError:
                return
            except OSError:  # the reading thread sees the end of it
                pass
            self._backlog.popleft()
            for fd in fds:
                os.close(fd)

    def _watch(self) -> None:
        with self._lock:
            if self._open and self._backlog:
                reader().add_writer(self._socket, self._drain)

    def _drain(self) -> None:
        with self._lock:
            self._flush()
            if not self._backlog:
                reader().remove_writer(self._socket)

    # ------------------------------------------------------------------------------------------- reading

    def _read(self) -> None:
        """In the reading thread: every message that is there."""
        while self._open:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, _FRAME_BYTES, _MAX_FDS)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._end()
                return
            self._take(pickle.loads(data), fds)

    def _take(self, message: Frame, fds: list[int]) -> None:
        kind, number, gone, body = message
        self._inbox.forget(gone)
        try:
            value = self._value(body, fds)
            failure = restored(*value) if kind == "failed" else None
        except WorkerError as error:
            value, failure = None, error
        if kind == "ask":
            question = Question(self, number)
            if failure is not None:
                question.fail(failure)
                return
            try:
                self._receive(value, question)
            except RuntimeError as error:  # the event loop that would answer is closed
                question.fail(error)
        elif (future := self._answered(number)) is not None:
            if failure is None:
                future.set_result(value)
            else:
                future.set_exception(failure)

    def _value(self, body: Body, fds: list[int]) -> Any:
        if isinstance(body, bytes):
            return unpack(body, ())
        num, loans, fresh = body
        for (ident, capacity), fd in zip(fresh, fds, strict=False):
            self._inbox.add(ident, capacity, fd)
        head, *pieces = self._inbox.pieces(num, loans)
        return unpack(head, pieces)

    def _answered(self, number: int) -> Future[Any] | None:
        """The future of a question, for its one result; None where nobody waits any more."""
        with self._lock:
            future = self._waiting.pop(number, None)
        return future if future is not None and future.set_running_or_notify_cancel() else None

    def _fail(self, number: int) -> None:
        if (future := self._answered(number)) is not None:
            future.set_exception(ConnectionError("the process at the other end is gone"))

    # ------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """From any thread; what is asked fails."""
        reader().call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """In the reading thread."""
        if not self._open:
            return
        with self._lock:
            self._open = False
            reader().remove_reader(self._socket)
            reader().remove_writer(self._socket)
            self._socket.close()
            outbox().leave(self._number)
            for fd in (fd for _, fds in self._backlog for fd in fds):
                os.close(fd)
            self._backlog.clear()
            waiting = list(self._waiting)
        for number in waiting:
            self._fail(number)
        self._lost()


def portable(error: BaseException) -> tuple[bytes, str]:
    """An exception as a pickle, if it has one, and as text with its traceback."""
    text = "".join(traceback.format_exception(error)).rstrip()
    with suppress(*UNPICKLABLE):
        return pickle.dumps(error), text
    return b"", text


def restored(content: bytes, text: str) -> BaseException:
    """The exception, with the other end's traceback as a note; a WorkerError where its type cannot be made here."""
    try:
        error = unpack(content, ())
    except WorkerError:
        return WorkerError(f"the other process raised {text.splitlines()[-1]}\n{text}")
    error.add_note(f"raised in another process:\n{text}")
    return error
