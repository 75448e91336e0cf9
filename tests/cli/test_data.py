"""`tandem data`, and what newcomers get wrong about data: each one message and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.cli.test_bad_input import complaint, train
from tests.e2e.runs import tandem

GOOD = '{"prompt": "2+2", "answer": "4"}\n'

FILES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "JSON and not JSON lines": ("a.jsonl", json.dumps([{"prompt": "a"}], indent=1), ("a.jsonl:1", "not valid JSON")),
    "a JSON file": ("a.json", "[]", ("a.json", ".jsonl, .parquet, .csv")),
    "Python and not JSON": ("a.jsonl", "{'prompt': 'a'}\n", ("a.jsonl:1", "not valid JSON")),
    "other column names": ("a.jsonl", '{"question": "a", "solution": "b"}\n', ("question, solution", "`columns`")),
    "an empty file": ("a.jsonl", "", ("a.jsonl", "empty")),
    "ShareGPT's keys": ("a.jsonl", '{"messages": [{"from": "human", "value": "a"}]}\n', ("message 0", "the role None")),
    "parts of content": (
        "a.jsonl",
        '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}\n',
        ("message 0: content", "must be a text"),
    ),
    "one id twice": ("a.jsonl", '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', ("a.jsonl:2", "'1'", "unique")),
    "no rejected": ("a.jsonl", '{"prompt": "a", "chosen": "b"}\n', ("lacks rejected",)),
    "two answers": ("a.jsonl", '{"prompt": "a", "answer": 1, "ground_truth": 2}\n', ("both answer and ground_truth",)),
    "commas in CSV": ("a.csv", "prompt,answer\nWhat, is it?,4\n", ("a.csv:2", "3 cells", "quote commas")),
    "semicolons in CSV": ("a.csv", "prompt;answer\na;4\n", ("has neither messages nor prompt (it has prompt;answer)",)),
    "parquet by name only": ("a.parquet", GOOD, ("a.parquet", "not a parquet file")),
    "no such file": ("b.jsonl", "", ("there is no dataset file",)),
}


@pytest.mark.parametrize(("name", "text", "words"), FILES.values(), ids=FILES.keys())
def test_a_wrong_file_is_refused(
    name: str, text: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if name != "b.jsonl":
        path.write_text(text)
    assert tandem("data", "check", str(path)) == 2
    message = complaint(capsys)
    assert [word for word in words if word not in message] == []


def test_train_says_what_check_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\nWhat, is it?,4\n")
    assert tandem("data", "check", str(tmp_path / "a.csv")) == 2
    message = complaint(capsys)
    assert train(tmp_path, "data.train.task=null", f"data.train.path={tmp_path / 'a.csv'}") == 2
    assert complaint(capsys) == message


SECTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a task and a file": (("data.train.path=a.jsonl",), ("data.train", "one of task", "path")),
    "nothing": (("data.train.task=null",), ("data.train", "one of task")),
    "a renamed column that is none": (
        ("data.train={path: FILE, columns: {question: prompt}}", "data.train.task=null"),
        ("columns renames question", "messages, prompt"),
    ),
    "sources beside a task": (("data.train.sources=[{path: a.jsonl}]",), ("data.train", "sources")),
    "a source of nothing": (("data.train={task: null, sources: [{weight: 1.0}]}",), ("data.train.sources.0", "one of task")),
    "a weight of 0": (("data.train={task: null, sources: [{path: a.jsonl, weight: 0.0}]}",), ("weight=0.0", "leave a source out")),
    "one weight of two": (
        ("data.train={task: null, sources: [{path: a.jsonl, weight: 1.0}, {path: b.jsonl}]}",),
        ("some sources have a weight",),
    ),
    "an unknown source": (("data.train={task: null, sources: [{task: calculatr}]}",), ("calculatr", "calculator")),
    "a limit that nothing keeps": (("data.train.max_tokens=1",), ("calculator/train", "max_tokens=1", "none is left")),
    "no tokens": (("data.train.max_tokens=0",), ("max_tokens=0", "at least 1")),
}


@pytest.mark.parametrize(("overrides", "words"), SECTIONS.values(), ids=SECTIONS.keys())
def test_a_wrong_section_is_named(
    overrides: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.jsonl").write_text(GOOD)
    assert train(tmp_path, *(override.replace("FILE", str(tmp_path / "good.jsonl")) for override in overrides)) == 2
    message = complaint(capsys)
    assert [word for word in words if word not in message] == []


OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a limit without a tokenizer": (("--max-tokens", "5"), ("--max-tokens 5", "--tokenizer")),
    "half a column": (("--column", "prompt="), ("--column prompt=", "OURS=THEIRS")),
    "a column that is not there": (("--column", "prompt=ask"), ("no column 'ask'", "prompt, answer")),
    "no tokenizer": (("--tokenizer", "no/such"), ("no/such",)),
}


@pytest.mark.parametrize(("options", "words"), OPTIONS.values(), ids=OPTIONS.keys())
def test_wrong_options_are_named(
    options: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.jsonl").write_text(GOOD)
    assert tandem("data", "check", str(tmp_path / "good.jsonl"), *options) == 2
    message = complaint(capsys)
    assert [word for word in words if word not in message] == []


def test_a_good_file_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.csv").write_text("question,solution\n2+2,4\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": "2+2", "solution": "4"}]), tmp_path / "test.parquet")
    columns = ("--column", "prompt=question", "--column", "answer=solution")
    assert tandem("data", "check", str(tmp_path / "train.csv"), "--heldout", str(tmp_path / "test.parquet"), *columns) == 0
    said = capsys.readouterr().out
    assert 'first answer  "4"' in said
    assert "1 of 1 held-out prompts" in said
