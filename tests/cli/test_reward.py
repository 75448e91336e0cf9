"""`tandem reward check`, and what newcomers get wrong about rewards: each one message and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.cli.test_bad_input import complaint, train
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


def test_rewards_that_say_nothing_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "-n", "2", "reward.function=environment") == 0
    assert "warning: every answer is worth 0" in capsys.readouterr().out


MISTAKES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "other arguments": ("def f(text, gold): return 1.0", (), ("(text, gold)", "(task, group)", "solution_str", "completions")),
    "arguments of two": ("def f(completions, solution_str): return 1.0", (), ("verl's and TRL's",)),
    "an argument that nobody gives": ("def f(solution_str, tokenizer): return 1.0", (), ("'tokenizer'",)),
    "a column that the data has not": ("def f(completions, solution): return [1.0]", (), ("'solution'",)),
    "one number for many": ("def f(completions): return 1.0", (), ("returned 1.0", "a list with one number")),
    "a dict without a score": ("def f(solution_str): return {'reward': 1.0}", (), ("a dict must have a score",)),
    "a text": ("def f(solution_str): return 'good'", (), ("returned 'good'",)),
    "params that it does not take": ("def f(solution_str): return 1.0", ("reward.params={k: 1}",), ("'k'",)),
    "always an exception": ("def f(solution_str): return 1 / 0", (), ("none of 4 answers could be judged", "ZeroDivisionError")),
    "a module that is not there": ("import nltkk\ndef f(solution_str): return 1.0", (), ("needs the package 'nltkk'",)),
    "a syntax error": ("def f(solution_str) return 1.0", (), ("SyntaxError", "reward.py:1")),
    "no pattern": ("", ("reward.function=regex",), ("'pattern'",)),
    "a pattern that is none": ("", ("reward.function=regex", "reward.params={pattern: '('}"), ("the pattern '('",)),
    "no reward": ("", ("reward=null",), ("no reward to check",)),
    "two at once": ("", ("reward.parts={a: {function: regex}}",), ("give one of function",)),
    "a part of nothing": ("", ("reward={function: null, parts: {a: {weight: 1.0}}}",), ("reward.parts.a", "give one of function")),
    "a judge without a model": ("", ("reward={function: null, judge: {url: 'http://h/v1'}}",), ("reward.judge.model is required",)),
    "a key that is not set": (
        "",
        ("reward={function: null, url: 'http://127.0.0.1:1/', key_env: TANDEM_NO_SUCH_KEY}",),
        ("TANDEM_NO_SUCH_KEY", "export it"),
    ),
    "a try longer than all": (
        "",
        ("reward={function: null, url: 'http://h/', try_limit_s: 99.0}",),
        ("try_limit_s=99.0 is above",),
    ),
    "answers of other data": ("", ("--answers", "FILE"), ("'gsm8k-1'", "ids are like")),
}


@pytest.mark.parametrize(("source", "arguments", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named(
    source: str, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answers.jsonl").write_text('{"task": "gsm8k-1", "text": "4"}\n')
    given = [argument.replace("FILE", str(tmp_path / "answers.jsonl")) for argument in arguments]
    recipe = write_recipe(tmp_path)
    if source:
        (tmp_path / "reward.py").write_text(source + "\n")
        given.append(f"reward.function={tmp_path / 'reward.py'}:f")
    assert tandem("reward", "check", str(recipe), "-n", "2", *given) == 2
    message = complaint(capsys)
    assert [word for word in words if word not in message] == []
