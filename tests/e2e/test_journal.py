"""Law 10 where a clock decides: a reward that was killed at its limit stays failed when the run goes on after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import REWARD, assert_same, forked, outcome, read_lines, write_recipe

HANGS_ONCE = (
    REWARD
    + """
import pathlib, time
_judge, _hung = digits, pathlib.Path(__file__).with_name("hung")
def digits(task, group):
    if group[0].key.ordinal == 3 and group[0].key.space == "train" and not _hung.exists():
        _hung.touch()
        time.sleep(600)
    return _judge(task, group)
"""
)
"""Asked again it would answer: only the journal knows that it did not."""


@pytest.mark.parametrize("crash", ["log.journal.after:4", "rollout.before_put:5", "update.before_step:12"])
def test_what_the_clock_decided_stays_decided(crash: str, tmp_path: Path) -> None:
    results = []
    for name in ("undisturbed", "killed"):
        directory = tmp_path / name
        directory.mkdir()
        recipe = str(write_recipe(directory, reward=HANGS_ONCE))
        arguments = ["train", recipe, f"run.dir={directory / 'run'}", "reward.limit_s=1.0"]
        if name == "killed":
            assert forked(arguments, directory / "log", crash_at=crash) == -9, (directory / "log").read_text()
            arguments.append("--resume")
        assert forked(arguments, directory / "log") == 0, (directory / "log").read_text()
        results.append(outcome(directory / "run"))
        group = [line for line in read_lines(directory / "run" / "samples.jsonl") if line["key"].startswith("train:3.")]
        assert [line["dropped"] for line in group] == ["reward_failed"] * 4
    assert_same(results[1], results[0])
