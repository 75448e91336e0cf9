"""cli: arguments reach `launch`, and every kind of failure is one message and an exit code."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tandem
from tandem import cli
from tandem.config import load
from tandem.errors import DataError, NonFiniteError, SnapshotError


@dataclass(frozen=True)
class StandIn:
    """A recipe small enough for these tests."""

    seed: int = 0


class Launch:
    """Takes the place of `tandem.launch`: notes its calls and fails as it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: BaseException | None = None
        self.begins = True

    def check(self, resolved: Any) -> None:
        self.checked = resolved.value

    def run(self, recipe: Any, *, resume: bool, dry_run: bool, begun: Callable[[], None]) -> None:
        self.calls.append((recipe.value, resume, dry_run))
        if self.begins:
            begun()
        if self.error:
            raise self.error

    def measure(self, recipe: Any, model: Path | None) -> None:
        self.calls.append((recipe.value, model))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("seed: 3\n", encoding="utf-8")
    stand_in, recipe = Launch(), ModuleType("tandem.recipe")
    recipe.load_recipe = lambda path, overrides: load(path, overrides, StandIn)  # type: ignore[attr-defined]
    for name, module in (("launch", stand_in), ("recipe", recipe)):
        monkeypatch.setitem(sys.modules, f"tandem.{name}", module)  # type: ignore[arg-type]
        monkeypatch.setattr(tandem, name, module, raising=False)
    return stand_in


@pytest.fixture
def run(launch: Launch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments, cli.Invocation())
        return code, *capsys.readouterr()

    return run


Run = Callable[..., tuple[int, str, str]]


# ---------------------------------------------------------------------------------------------------------- calls


def test_train_passes_the_recipe_the_overrides_and_the_flags(run: Run, launch: Launch) -> None:
    assert run("train", "r.yaml") == (0, "", "")
    assert run("train", "r.yaml", "--resume", "seed=4") == (0, "", "")
    assert run("train", "r.yaml", "seed=5", "--dry-run") == (0, "", "")
    assert launch.calls == [(StandIn(3), False, False), (StandIn(4), True, False), (StandIn(5), False, True)]


def test_eval_takes_a_recipe_or_a_run(run: Run, launch: Launch) -> None:
    run_directory = Path("runs/one")
    run_directory.mkdir(parents=True)
    (run_directory / "config.yaml").write_text("seed: 8\n", encoding="utf-8")
    (run_directory / "final").mkdir()
    assert run("eval", "r.yaml")[0] == 0
    assert run("eval", "r.yaml", "--model", "m", "seed=4")[0] == 0
    assert run("eval", "runs/one")[0] == 0
    assert run("eval", "runs/one", "--model", "m")[0] == 0
    final = run_directory / "final"
    assert launch.calls == [(StandIn(3), None), (StandIn(4), Path("m")), (StandIn(8), final), (StandIn(8), Path("m"))]
    code, _, err = run("eval", "runs")
    assert (code, err) == (2, "error: runs is not the directory of a run: it has no config.yaml\n")


def test_config_prints_values_with_their_origins(run: Run, launch: Launch) -> None:
    assert run("config", "r.yaml") == (0, "seed  3  r.yaml:1\n", "")
    assert run("config", "r.yaml", "seed=9") == (0, "seed  9  command line: seed=9\n", "")
    assert launch.checked == StandIn(9)


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("no task"), 2, "error: no task\n"),
        (NonFiniteError("loss is nan"), 1, "error: loss is nan\n"),
        (SnapshotError("damaged"), 1, "error: damaged\n"),
        (ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("inner", [DataError("no task")])]), 2, "error: no task\n"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/metrics.jsonl"),
            1,
            "error: no space left on the disk while writing runs/x/metrics.jsonl; free some space; go on with: "
            "tandem train r.yaml 'seed=4 ' --resume\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), 1, "error: Permission denied: runs\n"),
        (OSError("the header is too short"), 1, "error: the header is too short\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted; go on with: tandem train r.yaml 'seed=4 ' --resume\n"),
    ],
)
def test_foreseen_errors_are_one_message(run: Run, launch: Launch, error: BaseException, code: int, message: str) -> None:
    launch.error = error
    assert run("train", "r.yaml", "seed=4 ") == (code, "", message)


def test_a_run_that_has_not_begun_cannot_be_gone_on_with(run: Run, launch: Launch) -> None:
    launch.error, launch.begins = KeyboardInterrupt(), False
    assert run("train", "r.yaml") == (130, "", "\ninterrupted\n")


def test_debug_shows_the_traceback(run: Run, launch: Launch) -> None:
    launch.error = DataError("no task")
    for arguments in (("--debug", "train", "r.yaml"), ("train", "r.yaml", "--debug")):
        code, _, err = run(*arguments)
        assert code == 2
        assert err.startswith("Traceback (most recent call last)")
        assert err.endswith("error: no task\n")


@pytest.mark.parametrize("error", [ZeroDivisionError("division\nby zero"), ExceptionGroup("tasks", [ZeroDivisionError()])])
def test_what_nobody_foresaw_passes_through(run: Run, launch: Launch, error: Exception) -> None:
    launch.error = error
    with pytest.raises(type(error)):
        run("train", "r.yaml")


def test_the_hook_says_one_line_or_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ZeroDivisionError("division\nby zero")
    except ZeroDivisionError as error:
        caught = error
    cli._unexpected(cli.Invocation())(type(caught), caught, caught.__traceback__)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: unexpected ZeroDivisionError at .*test_cli\.py:\d+: division by zero", first)
    assert second == "run again with --debug to see the traceback"
    cli._unexpected(cli.Invocation(debug=True))(type(caught), caught, caught.__traceback__)
    assert capsys.readouterr().err.startswith("Traceback (most recent call last)")


def test_problems_of_a_recipe_and_of_the_arguments_are_the_users(run: Run) -> None:
    code, _, err = run("train", "r.yaml", "sead=1", "seed=x")
    assert code == 2
    assert "sead=1: unknown key 'sead'; did you mean 'seed'?" in err
    assert "seed: expected an integer, got x (text)" in err
    assert run("train", "missing.yaml")[0] == 2
    code, _, err = run("train", "r.yaml", "--rezume")
    assert code == 2
    assert "--resume" in err
    assert run("tarin")[0] == 2


# ---------------------------------------------------------------------------------------------------- the program


def _tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from tandem.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_help_answers_at_once() -> None:
    times: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        assert _tandem("--help").returncode == 0
        times.append(time.perf_counter() - started)
    assert min(times) < 0.5


@pytest.mark.parametrize("command", ["", "train", "eval", "config"])
def test_every_help_shows_examples(command: str) -> None:
    result = _tandem(*command.split(), "--help")
    assert result.returncode == 0
    assert re.search(r"Examples:\n +tandem ", result.stdout)


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'pydantic', 'yaml', 'rich', 'matplotlib', 'tandem.recipe', 'tandem.launch'}"
    code = f"import sys, tandem.cli; sys.exit(str(sorted({heavy} & set(sys.modules))) if {heavy} & set(sys.modules) else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60).stderr == ""


def test_the_version() -> None:
    assert _tandem("--version").stdout == f"tandem, version {tandem.__version__}\n"


DRIVER = """
import sys, time, types
import tandem, tandem.cli

def run(how, *, resume, dry_run, begun):
    begun()
    if how == "user":
        raise tandem.errors.DataError("no task")
    if how == "bug":
        1 / 0
    print("started", flush=True)
    time.sleep(30)

stand_in = types.SimpleNamespace(load_recipe=lambda path, overrides: overrides[0], run=run)
sys.modules["tandem.recipe"] = sys.modules["tandem.launch"] = tandem.recipe = tandem.launch = stand_in
tandem.cli.main()
"""


def test_exit_codes_of_the_program() -> None:
    """Over stand-ins for the recipe and the launch: a foreseen error, one that nobody foresaw, an interrupt."""
    command = [sys.executable, "-c", DRIVER, "train", "r.yaml"]
    for how, code, expected in (
        (["user"], 2, r"error: no task\n"),
        (["bug"], 1, r"error: unexpected ZeroDivisionError at .*: division by zero\nrun again with --debug .*\n"),
        (["bug", "--debug"], 1, r"(?s)Traceback .*ZeroDivisionError: division by zero\n"),
    ):
        result = subprocess.run([*command, *how], capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode == code
        assert re.fullmatch(expected, result.stderr)
    with subprocess.Popen([*command, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr.read() == "\ninterrupted; go on with: tandem train r.yaml wait --resume\n"
