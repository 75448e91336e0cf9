"""`tandem data`; what newcomers get wrong about data is in test_mistakes.py."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.cli.test_bad_input import complaint, train
from tests.e2e.runs import tandem


def test_train_says_what_check_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\nWhat, is it?,4\n")
    assert tandem("data", "check", str(tmp_path / "a.csv")) == 2
    message = complaint(capsys)
    assert train(tmp_path, "data.train.task=null", f"data.train.path={tmp_path / 'a.csv'}") == 2
    assert complaint(capsys) == message


def test_a_good_file_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.csv").write_text("question,solution\n2+2,4\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": "2+2", "solution": "4"}]), tmp_path / "test.parquet")
    columns = ("--column", "prompt=question", "--column", "answer=solution")
    assert tandem("data", "check", str(tmp_path / "train.csv"), "--heldout", str(tmp_path / "test.parquet"), *columns) == 0
    said = capsys.readouterr().out
    assert 'first answer  "4"' in said
    assert "1 of 1 held-out prompts" in said
