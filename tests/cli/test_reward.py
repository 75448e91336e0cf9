"""`tandem reward check`; what newcomers get wrong about rewards is in test_mistakes.py."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tandem.track.samples import SampleRecord
from tandem.types import Episode, Key, Message, Stop, Task
from tests.cli.test_bad_input import train
from tests.e2e.runs import tandem, write_recipe

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "digits" and extra_info["index"] == 0
    return {"score": float(solution_str.startswith(ground_truth)), "long": len(solution_str)}
"""


def verl_files(tmp_path: Path) -> tuple[str, ...]:
    """Overrides that name data in verl's layout and a reward as verl's users have it."""
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)[0]},
            "extra_info": {"index": 0, "split": "train"},
        }
        for i in range(8)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "verl_reward.py").write_text(VERL)
    data = (f"data.{part}={{task: null, path: {tmp_path / 'train.parquet'}}}" for part in ("train", "heldout"))
    return (*data, "agent={name: single_turn, env: null}", f"reward.function={tmp_path / 'verl_reward.py'}:compute_score")


def test_verls_data_and_reward_train_as_they_are(tmp_path: Path) -> None:
    """The warm-up is there for its characters: the model is new and its tokenizer that of the built-in task."""
    assert train(tmp_path, *verl_files(tmp_path)) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if "reward/long" in str(line)]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["task"].startswith("train-") for sample in samples} == {True}
    assert all(sample["reward"] in (0, 1) for sample in samples)


def check(tmp_path: Path, *arguments: str) -> int:
    return tandem("reward", "check", str(write_recipe(tmp_path)), *arguments)


def test_reference_answers_and_empty_ones_are_judged_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "-n", "3", *verl_files(tmp_path)) == 0
    said = capsys.readouterr().out
    assert said.count("train-") == 6
    assert "6 judged, mean 0.500, from 0 to 1; 0 failed;" in said
    assert "ms a group" in said


def test_given_answers_are_judged_as_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps({"task": "train-2", "text": text}) + "\n" for text in ("4", "5", "44")))
    _, heldout, *_ = overrides = verl_files(tmp_path)
    right, digit = "right: {function: exact_match}", "digit: {function: regex, params: {pattern: '4'}, weight: 0.5}"
    parts = f"reward={{function: null, parts: {{{right}, {digit}}}}}"
    assert check(tmp_path, "--answers", str(answers), overrides[0], heldout, parts) == 0
    said = capsys.readouterr().out
    assert "right 1, digit 1" in said
    assert "right 0, digit 1" in said
    assert "3 judged, mean 0.667, from 0 to 1.5; 0 failed" in said


def test_samples_of_a_run_are_judged_as_the_run_judged_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several turns the last counts, and what was cut off is."""
    task = Task("train-2", (Message("user", "4*1="),), "4")
    called = (Message("assistant", "<4*1>"), Message("tool", "4;"), Message("assistant", "4"))
    ends: tuple[tuple[tuple[Message, ...], Stop], ...] = (
        (called, "stop"),
        (called[2:], "stop"),
        (called[2:], "length"),
        (called[:2], "tool_limit"),
    )
    episodes = [Episode(Key("train", 0, i), task, (), (*task.messages, *turns), stop) for i, (turns, stop) in enumerate(ends)]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps(SampleRecord.of(episode).line()) + "\n" for episode in episodes))
    overrides = (*verl_files(tmp_path)[:3], "reward.function=exact_match")
    assert check(tmp_path, "--answers", str(samples), *overrides) == 0
    said = capsys.readouterr().out
    assert [line.split("│")[2:4] for line in said.splitlines() if "train-2" in line] == [
        [" 4      ", " 1      "],
        [" 4      ", " 1      "],
        [" 4      ", " 0      "],
        [" <4*1>  ", " 0      "],
    ]
    samples.write_text('{"task": "train-2", "text": "4", "stop": "eos"}\n')
    assert check(tmp_path, "--answers", str(samples), *overrides) == 2
    assert "samples.jsonl:1 says that it ended by stop='eos'; known: stop, length" in capsys.readouterr().err


def test_rewards_that_say_nothing_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "-n", "2", "reward.function=environment", "reward.workers=null") == 0
    assert "warning: every answer is worth 0" in capsys.readouterr().out
