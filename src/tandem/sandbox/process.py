"""Programs in processes of their own with the limits that the kernel keeps.

This keeps mistakes from doing harm: endless loops, floods of output, exhausted memory, forgotten children. It does not
keep out an attacker; see the class, and isolated.py for one that does.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.errors import DataError
from tandem.ports import Limits, Outcome
from tandem.sandbox.run import Run, checked_name

_LAUNCH = """
import json, os, resource, signal, sys
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
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


class SubprocessSandbox:
    """Implements the Sandbox port with processes of this machine, under this user.

    Kept: CPU seconds (whole ones, a process), wall time, address space, size of each file and of either output stream
    (`output_bytes`), no core dumps; a directory of its own as working directory, HOME and TMPDIR; no other environment,
    no input, no open files of ours; the process group is killed at the end.

    Not kept, so that code from strangers needs IsolatedSandbox, a container or a virtual machine around all of this: the program
    can use the network, read and write whatever this user can, start any number of processes, leave its process group, and
    fill the disk with files.

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
            run = Run(_spawn(program, directory, limits), limits, lambda pid: os.killpg(pid, signal.SIGKILL))
            try:
                await run.ended()
            finally:
                run.end()
            return run.outcome()


def _write(directory: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        target = directory / checked_name(name)
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
