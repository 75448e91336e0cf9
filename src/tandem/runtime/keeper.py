"""What has to be done on the node of a worker process, and by a process that lives on when the worker does not.

Only the standard library is used: Ray sends this module as code, so that the actor need not load torch.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

LOG_LINES, STACK_LINES = 15, 100  # of an error's message; the stacks of all threads of a Ray worker are long
_LINE_BYTES = 512  # at most, of those that are read


def log_end(path: Path, num_lines: int = LOG_LINES) -> str:
    """The last lines of a log, as sentences of an error message."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_lines * _LINE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError as error:
        return f"{path} cannot be read: {error}."
    return f"The end of {path}:\n" + "\n".join(f"  {line}" for line in lines) if lines else f"It wrote nothing to {path}."


class Keeper:
    """An actor that sees to the workers of its node."""

    def log_end(self, path: Path, num_lines: int) -> str:
        return log_end(path, num_lines)

    def dump(self, pid: int) -> None:
        """Has a worker write the stacks of its threads to its log, whatever it does."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
