"""Programs in processes of their own with the limits that the kernel keeps.

This keeps mistakes from doing harm: endless loops, floods of output, exhausted memory, forgotten children. It does not
keep out an attacker; see the class.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from tandem.errors import DataError
from tandem.ports import Limits, Outcome

Limit = Literal["cpu", "wall", "memory", "output"]

_LAUNCH = """
import json, os, resource, sys
for name, (soft, hard) in json.loads(sys.argv[1]).items():
    kind = getattr(resource, name)
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most)))
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""
_NO_MEMORY = ("MemoryError", "bad_alloc", "Cannot allocate memory")


class SubprocessSandbox:
    """Implements the Sandbox port with processes of this machine, under this user.

    Kept: CPU seconds (whole ones, a process), wall time, address space, size of each file and of either output stream
    (`output_bytes`), no core dumps; a directory of its own as working directory, HOME and TMPDIR; no other environment,
    no input, no open files of ours; the process group is killed at the end.

    Not kept, so that code from strangers needs a container or a virtual machine around all of this: the program can use
    the network, read and write whatever this user can, start any number of processes, and leave its process group.

    `limit` is "memory" where the kernel killed the program or it failed with words like MemoryError, which is a guess.
    exit_code is None where a signal of a limit ended the program, -N where another signal N did, and 127 where there is
    no such program.
    """

    async def run(self, program: Sequence[str], files: Mapping[str, str], limits: Limits) -> Outcome:
        """See the port. Raises DataError for an empty program, or a file that would not be inside the directory."""
        if not program:
            raise DataError("there is no program to run: give its name and its arguments")
        with tempfile.TemporaryDirectory(prefix="tandem-sandbox-", ignore_cleanup_errors=True) as directory:
            _write(Path(directory), files)
            run = _Run(_spawn(program, directory, limits), limits)
            try:
                await run.ended()
            finally:
                run.end()
            return run.outcome()


class _Run:
    """One process from its start to its outcome."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._limits = limits
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
        """Kills what is left of the process group, reads what it wrote last, and takes its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
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
        code = self._process.returncode
        most = self._limits.output_bytes
        stdout, stderr = (bytes(content[:most]).decode(errors="replace") for content in self._streams.values())
        limit = self._limit or ("output" if self._flooded() else self._limit_of(code, stderr))
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


def _write(directory: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise DataError(f"the file {name!r} would not be inside the sandbox's directory: give a relative path without '..'")
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")


def _spawn(program: Sequence[str], directory: str, limits: Limits) -> subprocess.Popen[bytes]:
    """The program as the leader of a process group, behind a launcher that sets the kernel's limits and becomes it."""
    cpu_s = math.ceil(limits.cpu_s)
    kernel = {
        "RLIMIT_CPU": (cpu_s, cpu_s + 1),  # SIGXCPU, then SIGKILL
        "RLIMIT_AS": (limits.memory_bytes, limits.memory_bytes),
        "RLIMIT_FSIZE": (limits.output_bytes, limits.output_bytes),
        "RLIMIT_CORE": (0, 0),
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCH, json.dumps(kernel), *program],
        cwd=directory,
        env={"HOME": directory, "TMPDIR": directory, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
