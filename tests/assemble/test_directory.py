"""What is left of a run that a mistake ends."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from tandem.assemble.directory import open_directory
from tandem.config import Resolved
from tandem.errors import RewardError, RunError
from tandem.recipe import Recipe, load_recipe
from tests.e2e.runs import write_recipe


@pytest.fixture
def resolved(tmp_path: Path) -> Resolved[Recipe]:
    return load_recipe(write_recipe(tmp_path), ())


def end(directory: Path, resolved: Resolved[Recipe], problem: BaseException, **files: str) -> None:
    """A run that leaves these files and ends so."""
    with suppress(type(problem)), open_directory(directory, resolved, False, Console(quiet=True)):
        for name, content in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(content)
        raise problem


def test_a_mistake_that_came_before_any_work_leaves_no_directory(tmp_path: Path, resolved: Resolved[Recipe]) -> None:
    end(tmp_path / "run", resolved, RewardError("it raises"), **{"metrics.jsonl": "", "tensorboard/events": ""})
    assert not (tmp_path / "run").exists()


def test_a_run_that_failed_says_why_until_it_is_resumed(tmp_path: Path, resolved: Resolved[Recipe]) -> None:
    run = tmp_path / "run"
    end(run, resolved, ExceptionGroup("two tasks", [RunError("[a disk] is full"), ValueError()]), **{"metrics.jsonl": "{}\n"})
    assert (run / "error.txt").read_text() == "RunError: [a disk] is full\n"
    with open_directory(run, resolved, True, Console(quiet=True)):
        assert not (run / "error.txt").exists()


def test_a_run_that_its_own_code_ended_failed(tmp_path: Path, resolved: Resolved[Recipe]) -> None:
    end(tmp_path / "run", resolved, SystemExit("no licence"), **{"metrics.jsonl": "{}\n"})
    assert (tmp_path / "run/error.txt").read_text() == "SystemExit: no licence\n"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_run_that_was_interrupted_did_not_fail(tmp_path: Path, resolved: Resolved[Recipe], interrupt: BaseException) -> None:
    end(tmp_path / "run", resolved, interrupt, **{"metrics.jsonl": "{}\n"})
    assert not (tmp_path / "run/error.txt").exists()


@pytest.mark.parametrize("work", ["snapshots/step-00000002/state.json", "warmup/snapshots/step-00000002/state.json"])
def test_work_stays_whatever_ended_the_run(tmp_path: Path, resolved: Resolved[Recipe], work: str) -> None:
    end(tmp_path / "run", resolved, RewardError("it raises"), **{"metrics.jsonl": "", work: ""})
    assert (tmp_path / "run" / work).is_file()


def test_measurements_stay(tmp_path: Path, resolved: Resolved[Recipe]) -> None:
    end(tmp_path / "run", resolved, RewardError("it raises"), **{"metrics.jsonl": "{}\n"})
    assert (tmp_path / "run/metrics.jsonl").is_file()


def test_a_run_that_failed_by_itself_stays_to_be_resumed(tmp_path: Path, resolved: Resolved[Recipe]) -> None:
    end(tmp_path / "run", resolved, RunError("a disk is full"), **{"metrics.jsonl": ""})
    assert (tmp_path / "run/config.yaml").is_file()


def test_a_resumed_run_keeps_what_it_found(tmp_path: Path, resolved: Resolved[Recipe]) -> None:
    """Rows of a queue may be there before the first snapshot is."""
    end(tmp_path / "run", resolved, RunError("it was killed"), **{"queue/rows": "sampled"})
    with suppress(RewardError), open_directory(tmp_path / "run", resolved, True, Console(quiet=True)):
        raise RewardError("it raises")
    assert (tmp_path / "run/queue/rows").read_text() == "sampled"
