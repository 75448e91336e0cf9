from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.faults import mark

CODE = """
from tandem.faults import crash_point, take_role
for turn in range(3):
    crash_point("door")
    print("door", turn, flush=True)
    crash_point("window")
    take_role("worker-1")
"""


def run(crash_at: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_CRASH")} | more
    if crash_at is not None:
        environment["TANDEM_CRASH_AT"] = crash_at
    return subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=60, check=False)


@pytest.mark.parametrize(
    ("crash_at", "printed"),
    [
        ("door", 0),
        ("window", 1),
        ("door:2", 1),
        ("window:3", 3),
        ("controller/door", 0),
        ("worker-1/door", 1),
        ("worker-1/window:2", 3),
        ("elsewhere window:2 door:3", 2),
    ],
)
def test_dies_at_the_named_point_the_named_time(crash_at: str, printed: int) -> None:
    done = run(crash_at)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.splitlines()) == printed


@pytest.mark.parametrize("crash_at", [None, "elsewhere", "door:4", "worker-2/door", "controller/window:2", "worker-1/door:3"])
def test_lives_otherwise(crash_at: str | None) -> None:
    done = run(crash_at)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 3)


def test_with_once_only_the_first_process_dies_there(tmp_path: Path) -> None:
    at = "worker-1/window:2"
    assert run(at, TANDEM_CRASH_ONCE=str(tmp_path)).returncode == -signal.SIGKILL
    assert mark(tmp_path, at).exists()
    assert run(f"{at} controller/window", TANDEM_CRASH_ONCE=str(tmp_path)).returncode == -signal.SIGKILL
    assert run(f"{at} controller/window", TANDEM_CRASH_ONCE=str(tmp_path)).returncode == 0


def test_a_trace_says_who_passed_what(tmp_path: Path) -> None:
    assert run("window:2", TANDEM_CRASH_TRACE=str(tmp_path / "trace")).returncode == -signal.SIGKILL
    passed = ["controller/door", "controller/window", "worker-1/door", "worker-1/window"]
    assert (tmp_path / "trace").read_text().split() == passed
