"""What people do to a run: Ctrl-C once and twice, and a reader of what it prints that goes away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.under_way import UnderWay
from tandem.train.torch_engine import TorchEngine
from tests.e2e.runs import started, write_recipe
from tests.faults.kills import MARK, nothing_is_left


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_a_run_in_order_and_a_second_one_at_once(times: int, tmp_path: Path) -> None:
    run, log, mark = tmp_path / "run", tmp_path / "log", f"ctrl-c-{os.getpid()}-{times}"
    command = ["train", str(write_recipe(tmp_path)), f"run.dir={run}"]
    process = started([*command, "trainer.steps=1000"], log, {MARK: mark})
    assert process.pid is not None
    until = time.monotonic() + 120
    while not (run / "snapshots" / "step-00000001").is_dir() and time.monotonic() < until:
        time.sleep(0.01)
    for _ in range(times):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.01)
    process.join(120)
    said = log.read_text()
    assert process.exitcode == 130, said
    assert "Traceback" not in said
    if times == 1:
        assert f"interrupted; go on with: tandem train {tmp_path / 'tiny.yaml'} run.dir={run} trainer.steps=1000 --resume" in said
    nothing_is_left(mark, tmp_path / "tmp")


def slow_disk(copied: Path) -> None:
    """Writing takes seconds; `copied` is there when the run goes on beside it."""
    write, start = TorchEngine._write, UnderWay.start

    def wrote(self: TorchEngine, state: Any, path: Path) -> None:
        time.sleep(3.0)
        write(self, state, path)

    def started_to_write(self: UnderWay, step: int, work: Coroutine[Any, Any, None]) -> None:
        start(self, step, work)
        copied.touch()

    TorchEngine._write, UnderWay.start = wrote, started_to_write  # type: ignore[method-assign]


def test_ctrl_c_lets_the_snapshot_that_is_being_written_become_whole(tmp_path: Path) -> None:
    run, log, copied = tmp_path / "run", tmp_path / "log", tmp_path / "copied"
    command = ["train", str(write_recipe(tmp_path)), f"run.dir={run}", "warmup=null", "trainer.steps=1000"]
    process = started(command, log, {}, partial(slow_disk, copied))
    assert process.pid is not None
    until = time.monotonic() + 120
    while not copied.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not (run / "snapshots" / "step-00000001").exists()
    os.kill(process.pid, signal.SIGINT)
    process.join(120)
    assert process.exitcode == 130, log.read_text()
    assert [path.name for path in (run / "snapshots").iterdir()] == ["step-00000001"]
    assert (run / "snapshots" / "step-00000001" / "manifest.json").is_file()


def test_a_run_goes_on_where_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = started(["train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}"], pipe, {})
    os.close(os.open(pipe, os.O_RDONLY))
    process.join(120)
    assert process.exitcode == 0
    assert (tmp_path / "run" / "summary.json").is_file()


def test_what_is_printed_for_a_reader_who_has_gone_ends_without_a_word(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = started(["algos"], pipe, {})
    os.close(os.open(pipe, os.O_RDONLY))
    process.join(120)
    assert process.exitcode == 1
