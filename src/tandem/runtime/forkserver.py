"""A process that has loaded torch and forks workers: the first costs seconds, each further one hundredths of one.

It has one thread, does nothing else, and is always quick to answer. When its parent is gone, however it went, it kills
every worker with all that the worker started; when it dies itself, the kernel kills the workers (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import NoReturn

from tandem.errors import WorkerError
from tandem.faults import crash_point, take_role
from tandem.runtime import worker
from tandem.runtime.link import Frame, Link, frame, pair
from tandem.runtime.placement import Seat

_START_LIMIT_S = 120.0
_END_LIMIT_S = 10.0
_MAIN = """
import json, sys
path, descriptor = json.loads(sys.argv[1])
sys.path[:] = path
from tandem.runtime.forkserver import main
main(descriptor)
"""

# ------------------------------------------------------------------------------------------- the parent's side


class ForkServer:
    """The server as its parent sees it."""

    def __init__(self) -> None:
        ours, theirs = pair()
        with theirs:
            call = json.dumps([sys.path, theirs.fileno()])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, call],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not survive the fork
            )
        self._link = Link(ours, lambda value, question: None)
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def fork(self, seat: Seat, end: socket.socket, log: int) -> int:
        """A worker with this end of a link, its output to the descriptor `log`; its process id. Raises ConnectionError where the
        server is gone.
        """
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                return await self._link.call(("fork", seat), [end.fileno(), log])
        except TimeoutError:
            raise WorkerError(
                f"the fork server gave no worker within {_START_LIMIT_S:g} s: is this machine short of memory?"
            ) from None

    async def ended(self, pid: int) -> int:
        """Waits for the worker's end: its exit code, or -N where signal N ended it."""
        return await self._link.call(("wait", pid))

    async def kill(self, pid: int) -> None:
        """Kills the worker and what it started; nothing happens where it has ended."""
        await self._link.call(("kill", pid))

    def close(self) -> None:
        """Ends the server and all its workers, and waits until it is gone."""
        self._link.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:  # a worker that the kernel does not let go
            self._process.kill()


_server: list[ForkServer] = []


def fork_server() -> ForkServer:
    """The fork server of this process; started at the first call, and once more where it has died."""
    if not _server or not _server[0].alive:
        _server[:] = [ForkServer()]
    return _server[0]


# ------------------------------------------------------------------------------------------- the server's side


def main(descriptor: int) -> None:
    """Serves until the parent is gone."""
    take_role("forkserver")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a segment of shared memory is a descriptor
    gc.collect()
    gc.freeze()  # collections in the workers leave shared pages alone
    control = socket.socket(fileno=descriptor)
    if job := _Server(control).serve():
        worker.run(*job)


Job = tuple[Seat, socket.socket, int, int]


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._workers: dict[int, int] = {}  # process descriptor -> process id
        self._codes: dict[int, int] = {}
        self._waiting: dict[int, list[int]] = {}  # process id -> questions
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> Job | None:
        """None when the parent is gone; in a forked worker, what it is to do."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._workers:
                    self._reap(descriptor)
                    continue
                with suppress(ConnectionError):
                    data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 2)
                    if data:
                        if job := self._handle(pickle.loads(data), fds):
                            return job
                        continue
                self._leave()

    def _handle(self, message: Frame, fds: list[int]) -> Job | None:
        _, number, _, body = message
        assert isinstance(body, bytes)
        match pickle.loads(body):
            case ("fork", seat):
                crash_point("fork.before")
                server = os.getpid()
                if (pid := os.fork()) == 0:
                    for descriptor in self._workers:
                        os.close(descriptor)
                    self._control.close()
                    return seat, socket.socket(fileno=fds[0]), fds[1], server
                for descriptor in fds:
                    os.close(descriptor)
                process = os.pidfd_open(pid)
                self._workers[process] = pid
                self._poll.register(process, select.POLLIN)
                crash_point("fork.after")
                self._answer(number, pid)
            case ("wait", pid):
                if pid in self._codes:
                    self._answer(number, self._codes[pid])
                else:
                    self._waiting.setdefault(pid, []).append(number)
            case ("kill", pid):
                if pid not in self._codes:
                    _kill(pid)
                self._answer(number, None)
            case other:
                raise AssertionError(f"a fork server is not asked {other!r}")
        return None

    def _answer(self, number: int, value: object) -> None:
        with suppress(ConnectionError):
            self._control.sendall(frame("done", number, pickle.dumps(value)))

    def _reap(self, descriptor: int) -> None:
        pid = self._workers.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _kill(pid)  # what it started; its number is taken until it is waited for
        self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for number in self._waiting.pop(pid, []):
            self._answer(number, self._codes[pid])

    def _leave(self) -> NoReturn:
        for pid in self._workers.values():
            _kill(pid)
        for pid in self._workers.values():
            os.waitpid(pid, 0)
        sys.exit(0)


def _kill(pid: int) -> None:
    """The worker's process group, and the worker itself should it not lead one yet."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
