"""Sides of a benchmark that take turns: each in a process of its own, with its own Python, one at a time.

A side is a module that is run as `python -m MODULE ARGUMENTS` in this directory and calls `serve`. It gets one job a line, as
JSON on its standard input, and answers with the CPU seconds that the job took its process. It imports nothing of Tandem.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def serve(do: Callable[[dict[str, Any]], object]) -> None:
    """Does every job that comes. Whatever a library prints goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            began = time.process_time()
            do(json.loads(line))
            print(json.dumps(time.process_time() - began), file=answers, flush=True)


class Side:
    """Use as a context; call with a job. Raises RuntimeError where the process ends without an answer."""

    def __init__(self, python: str, module: str, *arguments: str) -> None:
        command = [python, "-m", module, *arguments]
        place = Path(__file__).parent
        self.module = module
        self._process = subprocess.Popen(
            command, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **ONE_THREAD}
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def __call__(self, job: dict[str, Any]) -> float:
        """CPU seconds of the job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.module} ended with status {self._process.wait()} and without an answer")
        return float(json.loads(answer))


def by_turns(sides: Sequence[Callable[[Any], float]], jobs: Sequence[Any]) -> list[list[float]]:
    """Seconds of each side, job by job. All do a job before the next begins; the first job is done once before, to warm up."""
    for side in sides:
        side(jobs[0])
    turns = [[side(job) for side in sides] for job in jobs]
    return [list(of_side) for of_side in zip(*turns, strict=True)]
