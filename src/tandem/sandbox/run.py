"""One process from its start to its outcome: what it writes, how long it may take, and its end. Sandboxes share it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Literal

from tandem.errors import DataError
from tandem.ports import Limits, Outcome

Limit = Literal["cpu", "wall", "memory", "output"]

_NO_MEMORY = ("MemoryError", "bad_alloc", "Cannot allocate memory")


class Run:
    """A process with pipes for its output. kill: ends it and all that it started. code_of: the program's code, from its own, and
    the limit that is known to have ended it.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        limits: Limits,
        kill: Callable[[int], None],
        code_of: Callable[[int], tuple[int, Limit | None]] = lambda code: (code, None),
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._limits, self._kill, self._code_of = process, limits, kill, code_of
        self._streams = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        self._limit: Limit | None = None
        self._cpu_s = 0.0

    async def ended(self) -> None:
        """Waits until the process has ended or reaches a limit that is kept here: wall time, output."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Limit | None] = loop.create_future()
        process = os.pidfd_open(self._process.pid)

        def end(limit: Limit | None) -> None:
            if not ended.done():
                ended.set_result(limit)

        def read(descriptor: int) -> None:
            if not self._read(descriptor):
                loop.remove_reader(descriptor)
            elif self._flooded():
                end("output")

        timer = loop.call_later(self._limits.wall_s, end, "wall")
        loop.add_reader(process, end, None)
        for descriptor in self._streams:
            os.set_blocking(descriptor, False)
            loop.add_reader(descriptor, read, descriptor)
        try:
            self._limit = await ended
        finally:
            timer.cancel()
            for descriptor in (process, *self._streams):
                loop.remove_reader(descriptor)
            os.close(process)

    def end(self) -> None:
        """Kills what is left of it, reads what it wrote last, and takes its exit status."""
        with suppress(ProcessLookupError):
            self._kill(self._process.pid)
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._cpu_s = usage.ru_utime + usage.ru_stime
        for descriptor in self._streams:
            while not self._flooded() and self._read(descriptor):
                pass
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def outcome(self) -> Outcome:
        code, known = self._code_of(self._process.returncode)
        most = self._limits.output_bytes
        stdout, stderr = (bytes(content[:most]).decode(errors="replace") for content in self._streams.values())
        limit = self._limit or known or ("output" if self._flooded() else self._limit_of(code, stderr))
        return Outcome(None if limit is not None and code < 0 else code, stdout, stderr, limit)

    def _limit_of(self, code: int, stderr: str) -> Limit | None:
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and self._cpu_s >= self._limits.cpu_s):
            return "cpu"
        if code == -signal.SIGXFSZ:
            return "output"
        if code == -signal.SIGKILL or (code != 0 and any(words in stderr for words in _NO_MEMORY)):
            return "memory"
        return None

    def _read(self, descriptor: int) -> bool:
        """Takes what is there; False where there is no more."""
        try:
            content = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        self._streams[descriptor] += content
        return bool(content)

    def _flooded(self) -> bool:
        return any(len(content) > self._limits.output_bytes for content in self._streams.values())


def checked_name(name: str) -> str:
    """Of a file for a program. Raises DataError where it would not be inside the sandbox's directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise DataError(f"the file {name!r} would not be inside the sandbox's directory: give a relative path without '..'")
    return str(path)
