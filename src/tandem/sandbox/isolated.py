"""Programs from strangers, in Linux namespaces of their own: launcher.py makes them, the kernel keeps them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.errors import DataError, SandboxError
from tandem.ports import Limits, Outcome
from tandem.sandbox.launcher import BOX
from tandem.sandbox.run import Limit, Run, checked_name

_LAUNCHER = Path(__file__).with_name("launcher.py")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_MAX_OPEN_FILES = 256


class IsolatedSandbox:
    """Implements the Sandbox port with namespaces, without privileges, and with no file of this machine that could be written.

    Kept: what SubprocessSandbox keeps, and
      no network              its own, with nothing in it, not even a loopback
      no other processes      it sees its own; when the program ends, all of them are killed, however they were started
      no other files          /usr and the like and this Python, read-only; a home in memory, and a /tmp, `files_bytes` together
      no privileges           another user (nobody, where Tandem runs as root), no capabilities, none to be gained
      `processes`             at once, threads included
      `memory_bytes`          of all its processes together, beside that of each: looked at 50 times a second
      fewer system calls      where libseccomp is installed: no namespaces, mounts, tracing, keys, BPF, io_uring, other sockets,
                              memory that belongs to no process

    Not kept: between two looks more memory can be taken, and the kernel's own buffers (of pipes, of sockets) are not counted; the
    kernel is this machine's, so that who has a hole in it is not held; times and load can be observed.

    visible: further paths of this machine, which it may read. Raises SandboxError where this machine does not allow all of it:
    nothing is run with less.
    """

    def __init__(self, visible: Sequence[str] = ()) -> None:
        self._visible = sorted({*_SYSTEM, sys.prefix, sys.base_prefix, *visible}, key=len)  # what is inside another comes after it

    async def run(self, program: Sequence[str], files: Mapping[str, str], limits: Limits) -> Outcome:
        """See the port. Raises DataError for an empty program, or a file that would not be inside the directory."""
        if not program:
            raise DataError("there is no program to run: give its name and its arguments")
        job = self._job(program, files, limits)
        ours, theirs = os.pipe()
        try:
            try:
                process = _spawn(job, theirs)
            finally:
                os.close(theirs)
            run = Run(process, limits, lambda pid: os.kill(pid, signal.SIGTERM), lambda _: _code(ours))
            try:
                await run.ended()
            finally:
                run.end()
            return run.outcome()
        finally:
            os.close(ours)

    def _job(self, program: Sequence[str], files: Mapping[str, str], limits: Limits) -> bytes:
        cpu_s = math.ceil(limits.cpu_s)
        rlimits = {
            "RLIMIT_CPU": (cpu_s, cpu_s + 1),  # SIGXCPU, then SIGKILL
            "RLIMIT_AS": (limits.memory_bytes,) * 2,
            "RLIMIT_FSIZE": (limits.output_bytes,) * 2,
            "RLIMIT_CORE": (0, 0),
            "RLIMIT_NOFILE": (_MAX_OPEN_FILES,) * 2,
            "RLIMIT_NPROC": (limits.processes,) * 2,
        }
        job = {
            "program": list(program),
            "files": {checked_name(name): content for name, content in files.items()},
            "files_bytes": limits.files_bytes,
            "environment": {"HOME": BOX, "TMPDIR": BOX, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
            "visible": self._visible,
            "rlimits": rlimits,
            "memory_bytes": limits.memory_bytes,
        }
        return json.dumps(job).encode()


def _spawn(job: bytes, report: int) -> subprocess.Popen[bytes]:
    with os.fdopen(os.memfd_create("tandem-sandbox"), "r+b") as memory:  # a pipe would hold only so much
        memory.write(job)
        memory.flush()
        memory.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCHER), str(memory.fileno()), str(report)],
            pass_fds=(memory.fileno(), report),
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


def _code(report: int) -> tuple[int, Limit | None]:
    """What init reported: the program's exit code, and the limit that it went over; it was killed where there is no report.

    Raises SandboxError.
    """
    said = os.read(report, 1 << 16)
    if not said:
        return -signal.SIGKILL, None
    found = json.loads(said)
    if "error" in found:
        raise SandboxError(
            f"this machine gives no sandbox ({found['error']}): it needs Linux 5.12 with user namespaces, which containers and "
            f"some distributions forbid (docs/guides/rewards.md); sandbox=process runs programs with limits and without walls"
        )
    if "limit" in found:
        return -signal.SIGKILL, found["limit"]
    return os.waitstatus_to_exitcode(found["status"]), None
