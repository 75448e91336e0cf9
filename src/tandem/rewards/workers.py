"""Rewards by a function's name, in worker processes that can be killed: a hang or a crash costs one group its result.

    start ..> idle -> one group -> idle        answered: results, or failed with what the function raised
                          |
                          |-> killed           no answer within the limit, ended, or nobody waits any more; the next group
                          |                    gets a new worker
                          `-> killed by a signal of others (the kernel's, where memory was short): so does this group, once

A judgement that could not be made is a failed result with its reason, never a 0. A function that breaks its contract is a
RewardError and ends the run. What runs in a worker stands in child.py; how a failure counts is the trainer's to say.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from tandem.errors import RewardError
from tandem.rewards.child import HEADER, Answer, results
from tandem.rewards.config import PartConfig, RewardConfig
from tandem.rewards.patience import within
from tandem.rewards.replay import Journal, recorded, replayed
from tandem.types import Episode, Json, RewardResult, Task

_START_LIMIT_S = 60.0
_CHILD = """
import json, sys
path, *arguments = json.loads(sys.argv[1])
sys.path[:] = path
from tandem.rewards.child import serve
serve(*arguments)
"""


class FunctionReward:
    """Implements the Reward port with `config.function`, one group at a time a worker, in the order of the calls.

    journal: a group whose worker was lost is recorded there before its failed results are returned, and a group that is
    all in the journal is answered from it. Belongs to one event loop; `close` ends every worker.
    """

    def __init__(self, config: RewardConfig | PartConfig, journal: Journal | None = None) -> None:
        assert config.function is not None
        self._config, self._function = config, config.function
        self._journal = journal
        self._places = asyncio.Semaphore(config.at_once)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []

    async def start(self) -> None:
        """Starts a worker. Raises RewardError where the function cannot be loaded: sooner than the first call would."""
        async with self._places:
            self._idle.append(await self._worker())

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        """See the port. Raises RewardError where the function cannot be loaded or breaks its contract."""
        if (known := replayed(self._journal, group)) is not None:
            return known
        message = pickle.dumps((task, tuple(group)))
        try:
            async with self._places:
                try:
                    answer = await self._asked(self._idle.pop() if self._idle else await self._worker(), message)
                except _KilledError:
                    answer = await self._asked(await self._worker(), message)
        except _LostError as lost:
            failed = RewardResult.failed(f"reward function {self._function!r} {lost}")
            return recorded(self._journal, group, [failed] * len(group))
        return results(answer, len(group))

    async def _asked(self, worker: _Worker, message: bytes) -> Answer:
        """What it answers. Raises _LostError."""
        try:
            answer = await worker.ask(message, self._config.limit_s)
        except (_LostError, asyncio.CancelledError):
            await self._end(worker)
            raise
        self._idle.append(worker)
        return answer

    async def close(self) -> None:
        for worker in tuple(self._workers):
            await self._end(worker)
        self._idle.clear()

    async def _worker(self) -> _Worker:
        name = self._function
        worker = await _Worker.started([name, self._config.params])
        self._workers.add(worker)
        try:
            kind, content = await worker.answer(_START_LIMIT_S)
        except _LostError as lost:
            await self._end(worker)
            raise RewardError(f"reward function {name!r} {lost} while its module was imported: look at what that does") from None
        if kind == "broken":
            await self._end(worker)
            raise RewardError(content)
        return worker

    async def _end(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        await worker.end()


class _LostError(Exception):
    """A worker that gives no answer: the message says how, as the end of a sentence."""


class _KilledError(_LostError):
    """By a signal, which need not be the function's fault."""


class _Worker:
    """One process and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def started(cls, arguments: list[Json]) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            return cls(_spawn(theirs.fileno(), arguments), reader, writer)

    async def ask(self, message: bytes, limit_s: float) -> Answer:
        self._writer.write(HEADER.pack(len(message)) + message)
        return await self.answer(limit_s)

    async def answer(self, limit_s: float) -> Answer:
        """The next answer. Raises _LostError where none comes in time or the process has died."""
        try:
            return await within(limit_s, self._read())
        except TimeoutError:
            raise _LostError(f"gave no answer within {limit_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise self._death() from None

    async def _read(self) -> Answer:
        (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return pickle.loads(await self._reader.readexactly(size))

    async def end(self) -> None:
        """Kills the process with all that it started; nothing of it is left when this returns."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    def _death(self) -> _LostError:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return _LostError("lost its worker, which closed its end of the socket")
        if code < 0:
            return _KilledError(f"lost its worker, which was killed by {signal.Signals(-code).name}")
        return _LostError(f"lost its worker, which ended with exit code {code}")


def _spawn(fd: int, arguments: list[Json]) -> subprocess.Popen[bytes]:
    """A worker as the leader of a process group. What its function prints goes to stderr, and it has no input."""
    call = json.dumps([sys.path, fd, *arguments])
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, call], pass_fds=[fd], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
    )
