"""What the surroundings do to a run: a slow or stuck engine, a dead worker, a call that comes twice, a full disk, a jumping clock.

Where the run can go on, it ends as if nothing had happened; where it cannot, the error says why, and the resumed run does.
"""

from __future__ import annotations

import ast
import asyncio
import ctypes
import errno
import json
import os
import threading
import time
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.assemble import phases
from tandem.assemble.workers import Workers
from tandem.data_proto import DataProto
from tandem.durable import AppendLog
from tandem.errors import EngineError, QueueError, SnapshotError
from tandem.queue.memory import MemoryQueue
from tandem.rollout.stepping import SteppingEngine
from tandem.train.torch_engine import TorchEngine
from tandem.types import Metrics
from tests.e2e.runs import assert_same, forked, outcome, read_lines, started, write_recipe
from tests.faults.kills import came_to


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("undisturbed")
    assert forked(command(directory), directory / "log") == 0, (directory / "log").read_text()
    return came_to(directory / "run")


def command(directory: Path) -> list[str]:
    return ["train", str(write_recipe(directory)), f"run.dir={directory / 'run'}"]


# --------------------------------------------------------------------------------------------------------- engine


def slow_engine() -> None:
    steps = SteppingEngine._run

    async def run(self: SteppingEngine) -> None:
        await asyncio.sleep(0.1)
        await steps(self)

    SteppingEngine._run = run  # type: ignore[method-assign]


def stuck_engine() -> None:
    """From the fifth time on that it is given something to do."""
    steps, passed = SteppingEngine._run, count()

    async def run(self: SteppingEngine) -> None:
        if next(passed) >= 4:
            await asyncio.Event().wait()
        await steps(self)

    SteppingEngine._run = run  # type: ignore[method-assign]


def test_a_slow_engine_changes_nothing(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    assert forked(command(tmp_path), tmp_path / "log", before=slow_engine) == 0
    assert_same(came_to(tmp_path / "run"), undisturbed)


def test_an_engine_that_never_answers_is_an_error_that_shows_who_waits_where(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    limits = ["queue.stall_limit_s=2.0", "evaluation.stall_limit_s=2.0"]
    assert forked([*command(tmp_path), *limits], log, before=stuck_engine) == 1
    said = log.read_text()
    assert "Traceback" not in said
    assert "nothing changed for 2 s" in said or "evaluation waited 2 s" in said
    for place in ("in _sample\n", "self._engine.generate(request)", "asyncio.Event().wait()"):
        assert place in said, said
    assert "go on with: tandem train" in " ".join(said.split())
    assert forked([*command(tmp_path), "--resume"], log) == 0, log.read_text()
    assert_same(came_to(tmp_path / "run"), undisturbed)


# --------------------------------------------------------------------------------------------------------- worker


def worker_that_dies(at: int) -> None:
    """As if the process of the engine's rank were killed in its optimiser's step of that number, once."""
    step, steps = TorchEngine.step, count(1)

    def dies(self: TorchEngine) -> Metrics:
        if next(steps) == at:
            Workers.death = "rank 0 of pool trainer was killed, says the test"  # type: ignore[assignment]
            raise EngineError("what a death looks like from elsewhere, says the test")
        return step(self)

    TorchEngine.step = dies  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("at", "where"),
    [
        pytest.param(5, "warmup goes on by itself from step 4", marks=pytest.mark.slow),
        (11, "train goes on by itself from step"),
    ],
)
def test_a_run_whose_worker_dies_goes_on_to_the_same_end(at: int, where: str, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """`test_kills.py` does it with processes."""
    log, run = tmp_path / "log", tmp_path / "run"
    assert forked(command(tmp_path), log, before=partial(worker_that_dies, at)) == 0, log.read_text()
    said = " ".join(log.read_text().split())
    assert f"warning: {where}" in said
    assert "(restart 1): rank 0 of pool trainer was killed, says the test" in said
    assert_same(came_to(run), undisturbed)
    assert json.loads((run / "summary.json").read_text())["restarts"] == 1
    metrics = run / "metrics.jsonl" if "train" in where else run / "warmup" / "metrics.jsonl"
    assert [line["run/restarts"] for line in read_lines(metrics) if "run/restarts" in line] == [1]


def test_a_death_ends_a_run_that_is_not_to_go_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked([*command(tmp_path), "trainer.restarts=0"], log, before=partial(worker_that_dies, 1)) == 1
    said = " ".join(log.read_text().split())
    assert "error: what a death looks like from elsewhere" in said
    assert "by itself" not in said


# ------------------------------------------------------------------------------------------------------- delivery


def twice(name: str, log: Path, puts: list[DataProto]) -> None:
    """A method of the queue whose calls come again when they were answered, and all rows when a batch was consumed."""
    method, put = getattr(MemoryQueue, name), MemoryQueue.put

    async def repeated(self: MemoryQueue, *arguments: Any) -> None:
        await method(self, *arguments)
        again = [partial(method, self, *arguments)]
        if name == "put":
            puts.append(arguments[0])
        elif name == "ack":
            again += [partial(put, self, rows) for rows in puts]
        for call in again:
            try:
                await call()
                verdict = "taken"
            except QueueError:
                verdict = "refused"
            with log.open("a") as file:
                file.write(f"{name} {verdict}\n")

    setattr(MemoryQueue, name, repeated)


def delivered_twice(log: Path) -> None:
    puts: list[DataProto] = []
    for name in ("ack", "put", "write", "drop", "commit"):
        twice(name, log, puts)


def test_what_reaches_the_queue_twice_changes_nothing(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "twice"
    assert forked(command(tmp_path), tmp_path / "log", before=partial(delivered_twice, log)) == 0, (tmp_path / "log").read_text()
    assert_same(came_to(tmp_path / "run"), undisturbed)
    seen = Counter(log.read_text().splitlines())
    assert set(seen) == {"put refused", "ack refused", "write taken", "commit taken"}
    assert seen["ack refused"] > 100, "with rows of groups that were consumed"


# ----------------------------------------------------------------------------------------------------------- disk


def no_room_for_a_line(name: str, number: int) -> None:
    """The disk is full in the middle of the line of that number in the log of that name."""
    write, written = AppendLog._write, count(1)

    def full(self: AppendLog, data: bytes) -> None:
        if self.path.stem == name and next(written) == 2 * number:  # a line is written in two halves
            write(self, data[:1])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        write(self, data)

    AppendLog._write = full  # type: ignore[method-assign]


@pytest.mark.parametrize(("name", "number"), [("metrics", 9), pytest.param("samples", 11, marks=pytest.mark.slow)])
def test_a_full_disk_in_the_middle_of_a_line(name: str, number: int, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked(command(tmp_path), log, before=partial(no_room_for_a_line, name, number)) == 1
    said = " ".join(log.read_text().split())
    assert f"cannot write a line of {tmp_path / 'run' / name}.jsonl: No space left on device" in said
    assert "MB are free at" in said
    assert "Traceback" not in said
    assert forked([*command(tmp_path), "--resume"], log) == 0, log.read_text()
    assert_same(came_to(tmp_path / "run"), undisturbed)


def disk(slow_s: float = 0.0, *, taken: int = 1000, problem: OSError | None = None) -> None:
    """Takes so many snapshots, each slowly, and of the next ones nothing at all, or raises."""
    write, written = TorchEngine._write, count()

    def wrote(self: TorchEngine, state: Any, path: Path) -> None:
        time.sleep(slow_s)
        if next(written) >= taken:
            if problem is not None:
                raise SnapshotError(str(problem)) from problem
            threading.Event().wait()
        write(self, state, path)

    TorchEngine._write = wrote  # type: ignore[method-assign]


def test_a_slow_disk_changes_nothing(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    assert forked(command(tmp_path), tmp_path / "log", before=partial(disk, 0.2)) == 0, (tmp_path / "log").read_text()
    assert_same(came_to(tmp_path / "run"), undisturbed)


def test_a_run_that_is_killed_while_a_snapshot_is_written_goes_on_from_the_one_before(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Three of the warm-up, one of the main phase; of step 2 nothing is written when step 3 has been trained."""
    log = tmp_path / "log"
    arguments = [*command(tmp_path), "snapshots.keep_last=1"]
    before = partial(disk, taken=4)
    assert forked(arguments, log, crash_at="update.after_step:12", before=before) == -9, log.read_text()
    left = sorted(path.name for path in (tmp_path / "run" / "snapshots").iterdir())
    assert left[0] == "step-00000001"
    assert left[1].startswith("step-00000002.partial-")
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert max(line["step"] for line in lines) == 2
    assert forked([*arguments, "--resume"], log) == 0, log.read_text()
    assert "resuming from" in log.read_text()
    assert "step-00000001" in log.read_text()
    assert_same(came_to(tmp_path / "run"), undisturbed)


def test_a_disk_that_takes_no_more_is_an_error_that_names_the_snapshot(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked([*command(tmp_path), "runtime.limit_s=2"], log, before=partial(disk, taken=4)) == 1, log.read_text()
    said = log.read_text()
    assert "the snapshot of step 2 is not whole, and nothing was written for 2 s, after" in " ".join(said.split())
    assert "thread saving to " in said
    assert "threading.Event().wait()" in said
    assert "Traceback" not in said
    assert forked([*command(tmp_path), "--resume"], log) == 0, log.read_text()
    assert_same(came_to(tmp_path / "run"), undisturbed)


def no_room_for_a_copy() -> None:
    phases.fits = lambda planned: False
    TorchEngine.snapshot = None  # type: ignore[assignment, method-assign]  # whoever called it would fail


def test_without_room_for_a_copy_the_run_waits_for_its_snapshots(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    assert forked(command(tmp_path), tmp_path / "log", before=no_room_for_a_copy) == 0, (tmp_path / "log").read_text()
    assert "train: this machine has no room for a copy of what is trained, so that the run waits" in (tmp_path / "log").read_text()
    assert_same(came_to(tmp_path / "run"), undisturbed)


FULL = OSError("the disk is full, says the test")


@pytest.mark.parametrize("taken", [pytest.param(4, id="in the middle"), pytest.param(6, id="at the end", marks=pytest.mark.slow)])
def test_a_snapshot_that_fails_while_the_run_goes_on_ends_it(taken: int, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked(command(tmp_path), log, before=partial(disk, taken=taken, problem=FULL)) == 1, log.read_text()
    said = " ".join(log.read_text().split())
    assert "the disk is full, says the test" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "summary.json").exists()
    assert forked([*command(tmp_path), "--resume"], log) == 0, log.read_text()
    assert_same(came_to(tmp_path / "run"), undisturbed)


def engine_and_disk_fail(taken: int) -> None:
    disk(0.3, taken=taken, problem=FULL)
    step, steps = TorchEngine.step, count()

    def fails(self: TorchEngine) -> Metrics:
        if next(steps) == 10:  # the first of step 3 of the main phase
            raise EngineError("the engine is broken, says the test")
        return step(self)

    TorchEngine.step = fails  # type: ignore[method-assign]


def test_a_snapshot_that_fails_beside_another_error_is_told_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked(command(tmp_path), log, before=partial(engine_and_disk_fail, 4)) == 1
    said = " ".join(log.read_text().split())
    assert "the engine is broken, says the test" in said
    assert "warning: the snapshot of step 2 is not there: the disk is full, says the test" in said


_CLONE_NEWNS, _CLONE_NEWUSER, _MS_REMOUNT = 0x20000, 0x10000000, 32


def small_disk(place: Path, kib: int) -> None:
    """Mounts a disk of that size, which only this process sees. Raises OSError where it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    _system(libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if user else 0)))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _system(libc.mount(b"none", bytes(place), b"tmpfs", 0, f"size={kib}k".encode()))


def _system(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def on_a_small_disk(place: Path, kib: int, results: Path) -> None:
    """A run on a disk that is too small, and on it again when it is larger; in a process of its own, with which the disk goes."""
    try:
        small_disk(place, kib)
    except OSError as error:
        results.write_text(f"skip {error}")
        os._exit(0)
    from tandem.cli import Invocation, run

    arguments = command(place)
    first = run(arguments, Invocation())
    print("---- more room", flush=True)
    _system(ctypes.CDLL(None, use_errno=True).mount(b"none", bytes(place), b"tmpfs", _MS_REMOUNT, b"size=64m"))
    second = run([*arguments, "--resume"], Invocation())
    same = ""
    if second == 0:
        found = outcome(place / "run")
        same = str(found["weights"])
    results.write_text(f"{first} {second} {same}")
    os._exit(0)


@pytest.mark.parametrize("kib", [160, pytest.param(320, marks=pytest.mark.slow)])
def test_a_full_disk_at_a_snapshot(kib: int, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    place, log, results = tmp_path / "disk", tmp_path / "log", tmp_path / "results"
    place.mkdir()
    process = started([], log, {}, partial(on_a_small_disk, place, kib, results))
    process.join(200)
    assert process.exitcode == 0, log.read_text()
    if results.read_text().startswith("skip"):
        pytest.skip(f"this user may not mount a small disk: {results.read_text()}")
    said = " ".join(log.read_text().partition("---- more room")[0].split())
    assert results.read_text() == f"1 0 {undisturbed['weights']}", log.read_text()
    assert "No space left on device" in said or "no space left" in said.lower(), said
    assert f"are free at {place}" in said
    assert "Traceback" not in log.read_text()


# ---------------------------------------------------------------------------------------------------------- clock


def jumping_clock() -> None:
    """Each look at the time of day is hours before or after the last one."""
    now, looks = time.time, count()
    time.time = lambda: now() + 3600.0 * (-7, 0, 30)[next(looks) % 3]


def test_a_clock_that_jumps_changes_nothing(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    assert forked(command(tmp_path), tmp_path / "log", before=jumping_clock) == 0, (tmp_path / "log").read_text()
    assert_same(came_to(tmp_path / "run"), undisturbed)


def test_the_time_of_day_is_for_people_alone() -> None:
    """It is written beside metrics, and no wait and no decision knows it."""
    source = Path(tandem.__file__).parent
    users = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("time", "time")
    }
    assert users <= {"track/jsonl.py", "track/mlflow.py", "track/trace.py", "trainer/timeline.py"}
