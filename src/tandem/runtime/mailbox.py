"""Where the workers of a process leave what they ask of a queue elsewhere, until its owner comes for it and brings the answer."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from functools import cache
from itertools import count

from tandem.runtime.objects import Answer, Packed


@cache
def mailbox(name: str) -> Mailbox:
    """The one of this process for the queue of that name."""
    return Mailbox()


class Mailbox:
    """What was asked in this process and waits to be fetched, or to be answered. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[tuple[int, Packed]] = deque()
        self._fetching: deque[Future[tuple[int, Packed]]] = deque()
        self._waiting: dict[int, Future[Answer]] = {}
        self._numbers = count()
        self._closed = False

    def ask(self, value: Packed) -> Future[Answer]:
        """The answer; ConnectionError where the owner of the queue has closed it."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(ConnectionError())
                return future
            number = next(self._numbers)
            self._waiting[number] = future
            if self._fetching:
                self._fetching.popleft().set_result((number, value))
            else:
                self._asked.append((number, value))
        return future

    def question(self) -> Future[tuple[int, Packed]]:
        """The oldest question that was not fetched yet, with its number."""
        future: Future[tuple[int, Packed]] = Future()
        with self._lock:
            if self._asked:
                future.set_result(self._asked.popleft())
            else:
                self._fetching.append(future)
        return future

    def answer(self, number: int, given: Answer) -> None:
        with self._lock:
            future = self._waiting.pop(number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(given)

    def close(self) -> None:
        """Whoever still waits is told."""
        with self._lock:
            self._closed = True
            waiting, fetching = list(self._waiting.values()), list(self._fetching)
            self._waiting.clear()
            self._fetching.clear()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ConnectionError())
        for future in fetching:
            future.cancel()
