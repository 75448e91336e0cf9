"""What has to be done on the node of a worker process, and by a process that lives on when the worker does not.

Only the standard library is used: Ray sends this module as code, so that these actors need not load torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def kill_tree(pid: int) -> None:
    """Kills a worker and its process group, and the worker itself should it not lead one yet."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Keeper:
    """An actor that sees to the workers of its node."""

    def log_end(self, path: Path, num_lines: int) -> str:
        return log_end(path, num_lines)

    def kill(self, pid: int) -> None:
        kill_tree(pid)

    def dump(self, pid: int) -> None:
        """Has a worker write the stacks of its threads to its log, whatever it does."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


class Mailbox:
    """An actor between workers, which ask, and a controller, which nobody can call: it fetches the questions and answers them.

    What is asked and answered is not looked at.
    """

    def __init__(self) -> None:
        self._asked: deque[tuple[int, Any]] = deque()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._there = asyncio.Event()
        self._closed = False

    async def ask(self, question: Any) -> Any:
        """Waits for the answer; ConnectionError where the controller has closed."""
        if self._closed:
            raise ConnectionError
        self._number += 1
        number = self._number
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        self._asked.append((number, question))
        self._there.set()
        return await answer

    async def questions(self) -> list[tuple[int, Any]]:
        """All that were asked since the last time, at least one, with their numbers."""
        await self._there.wait()
        self._there.clear()
        asked = list(self._asked)
        self._asked.clear()
        return asked

    async def answer(self, number: int, answer: Any) -> None:
        self._waiting.pop(number).set_result(answer)
