"""What goes wrong in a run and to its directory: one clear message, the right exit code, and nothing half-written.

The list of what newcomers get wrong is in test_mistakes.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import tandem, write_recipe

SHORT = ("trainer.steps=1", "warmup.steps=1", "warmup.snapshot_every=0")


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on stderr, which is one message and no traceback."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert text.count("error:") == 1
    return text


def train(tmp_path: Path, *overrides: str, **files: str) -> int:
    return tandem("train", str(write_recipe(tmp_path, **files)), f"run.dir={tmp_path / 'run'}", *SHORT, *overrides)


REWARDS: dict[str, tuple[str, int, str]] = {
    "NaN": ("return [float('nan')] * len(group)", 1, "nan"),
    "None": ("return [None] * len(group)", 1, "None"),
    "an exception": ("raise KeyError('colour')", 2, "colour"),
    "the wrong count": ("return [1.0]", 2, "1"),
    "no list": ("return 1.0", 2, "1.0"),
    "text": ("return ['good'] * len(group)", 2, "good"),
}


@pytest.mark.parametrize(("body", "code", "word"), REWARDS.values(), ids=REWARDS.keys())
def test_a_reward_that_breaks_its_contract(
    body: str, code: int, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "warmup=null", "data.heldout=null", reward=f"def digits(task, group):\n    {body}\n") == code
    message = complaint(capsys)
    assert word in message
    if code == 2:
        assert not (tmp_path / "run").exists()
    else:
        assert not (tmp_path / "run" / "samples.jsonl").read_text()


def test_a_reward_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = "import time\ndef digits(task, group):\n    time.sleep(600)\n"
    assert train(tmp_path, "warmup=null", "data.heldout=null", "reward.limit_s=0.3", reward=hangs) == 1
    assert "0.3 s" in complaint(capsys)


def test_a_run_cannot_be_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("precious")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, file in (("notes", "notes"), ("notes/run", "notes"), ("nowhere", "nowhere")):
        assert train(tmp_path, f"run.dir={tmp_path / name}") == 2
        assert f"{tmp_path / file} is no directory" in complaint(capsys)


def test_an_earlier_run_in_the_working_directory_stays(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Put aside, it would still be the working directory, and the new run would write into it."""
    shutil.copytree(finished, tmp_path / "run")
    for inside, path in ((".", "."), ("final", ".."), ("snapshots", str(tmp_path / "run"))):
        monkeypatch.chdir(tmp_path / "run" / inside)
        assert train(tmp_path, f"run.dir={path}") == 2
        assert "working directory" in complaint(capsys)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_an_earlier_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert train(tmp_path, "warmup=null") == 0
    assert "is kept as" in capsys.readouterr().out
    assert (tmp_path / "run.1" / "summary.json").is_file()
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_run_that_is_finished_says_so_in_one_line_and_stays_as_it_is(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    before = {path: path.stat().st_ctime_ns for path in run.rglob("*")}
    for steps in (1, 2):
        assert (
            tandem("train", str(write_recipe(tmp_path)), f"run.dir={run}", f"trainer.steps={steps}", "warmup=null", "--resume") == 0
        )
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"{run} is finished, with 2 steps:")
        assert "trainer.steps=N" in line
    assert {path: path.stat().st_ctime_ns for path in run.rglob("*")} == before


def test_a_run_that_was_killed_after_its_last_step_keeps_the_values_that_it_had(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "summary.json").unlink()
    config = (run / "config.yaml").read_text()
    arguments = ("train", str(write_recipe(tmp_path)), f"run.dir={run}", "trainer.steps=2", "warmup=null", "train.lr=0.5")
    assert tandem(*arguments, "--resume") == 0
    assert "all 2 steps are done: nothing is left to train" in capsys.readouterr().out
    assert (run / "config.yaml").read_text() == config
    assert tandem(*arguments, "trainer.steps=3", "--resume") == 0
    assert "lr: 0.5" in (run / "config.yaml").read_text()


def test_a_full_disk_while_a_snapshot_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        assert train(tmp_path, "warmup=null") == 1
    assert "free" in complaint(capsys)
    assert not list((tmp_path / "run" / "snapshots").iterdir())
    assert tandem("train", str(tmp_path / "tiny.yaml"), f"run.dir={tmp_path / 'run'}", *SHORT, "warmup=null", "--resume") == 0


def test_a_damaged_snapshot_is_passed_over(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    newest, older = sorted((run / "snapshots").iterdir(), reverse=True)
    weights = newest / "train" / "model" / "whole.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    (run / "summary.json").unlink()
    arguments = ("train", str(write_recipe(tmp_path)), f"run.dir={run}", "trainer.steps=2", "warmup=null", "--resume")
    assert tandem(*arguments) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert newest.name in said
    assert older.name in said
    assert (
        json.loads((run / "summary.json").read_text())["weights"] == json.loads((finished / "summary.json").read_text())["weights"]
    )


def test_damaged_snapshots_and_nothing_else(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for snapshot in (run / "snapshots").iterdir():
        (snapshot / "manifest.json").write_text("{}")
    arguments = ("train", str(write_recipe(tmp_path)), f"run.dir={run}", "trainer.steps=3", "warmup=null", "--resume")
    assert tandem(*arguments) == 1
    assert "snapshots" in complaint(capsys)


def test_a_failed_start_leaves_the_run_before_it_alone(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for mistake in ("reward.function=calculatr", "algorithm=gpro", "data.train.size=1000000", "algorithm=opd"):
        assert train(tmp_path, "warmup=null", mistake) == 2
        complaint(capsys)
    assert (run / "summary.json").is_file()
    assert not (tmp_path / "run.1").exists()


@pytest.mark.parametrize("change", ["seed=5", "model.new.hidden_size=48", "algorithm=gspo"])
def test_a_resumed_run_cannot_become_another(
    change: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    arguments = ("train", str(write_recipe(finished.parent)), f"run.dir={run}", "trainer.steps=3", "warmup=null", "--resume")
    assert tandem(*arguments, change) == 2
    assert change.split("=")[1] in complaint(capsys)
    assert (run / "config.yaml").read_text() == config
    assert tandem(*arguments) == 0
    assert "resuming with trainer.steps=3 where the run had 2" in capsys.readouterr().out


def test_a_run_that_is_going_on_has_no_model_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert tandem("chat", str(tmp_path)) == 2
    os.close(descriptor)
    assert f"it is going on, `tandem show {tmp_path}` has how" in complaint(capsys)
