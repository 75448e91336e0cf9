import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tandem.data.files import FileDataset
from tandem.errors import DataError
from tandem.types import Message, Task, ToolCall


def written(path: Path, *rows: Any) -> Path:
    """As .jsonl; a text is written as it is."""
    path = path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def as_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path / "rows.parquet")
    return path / "rows.parquet"


CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}, {"name": "say", "arguments": "hi"}]


@pytest.mark.parametrize("write", [written, as_parquet])
def test_columns_become_a_task(write: Any, tmp_path: Path) -> None:
    dataset = FileDataset(
        write(
            tmp_path,
            {"id": "a", "prompt": "2+2 é", "answer": "4", "level": 3, "tags": [{"x": "1", "y": None}]},
            {"id": "b", "prompt": "3+3", "answer": "6", "level": 0.5, "tags": []},
        )
    )
    assert dataset.name == "rows"
    assert dataset[0] == Task("a", (Message("user", "2+2 é"),), "4", "rows", {"level": 3, "tags": [{"x": "1", "y": None}]})
    assert dataset[1].answer == "6"


def test_conversations_completions_and_numbers_of_rows(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    called = {"role": "assistant", "content": None, "tool_calls": CALLS}
    dataset = FileDataset(
        written(
            tmp_path,
            {"messages": [*talk, called, {"role": "tool", "content": "2", "name": "add"}]},
            "",
            {"prompt": talk, "completion": "C", "ground_truth": {"x": [1]}},
            {"prompt": "P", "id": 7},
        )
    )
    opened = (Message("system", "S"), Message("user", "U"))
    calls = (ToolCall("add", '{"a": 1}'), ToolCall("say", "hi"))
    assert dataset[0] == Task("rows-0", (*opened, Message("assistant", "", calls), Message("tool", "2", (), "add")), None, "rows")
    assert dataset[1] == Task("rows-1", (*opened, Message("assistant", "C")), {"x": [1]}, "rows")
    assert dataset[2].id == "7"


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "Q", "gold": 5, "id": 1})
    assert FileDataset(path, {"prompt": "question", "answer": "gold"})[0] == Task("1", (Message("user", "Q"),), 5, "rows")
    with pytest.raises(DataError, match=r"rows\.jsonl:1 has no column 'ask', which is to be its prompt; it has question, gold, id"):
        FileDataset(path, {"prompt": "ask"})
    with pytest.raises(DataError, match=r"columns renames question; what a file's column can stand for is messages, prompt"):
        FileDataset(path, {"question": "prompt"})


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ((), "rows.jsonl is empty"),
        (("", " "), "rows.jsonl is empty"),
        (({"prompt": "a"}, '{"prompt": '), r"rows\.jsonl:2 is not valid JSON"),
        (({"prompt": "a"}, "", "[1]"), r"rows\.jsonl:3 holds \[1\]; every line must be a JSON object"),
        (('{"prompt": "a", "answer": NaN}',), "rows.jsonl:1 is not valid JSON: NaN"),
        (({"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}), r"rows\.jsonl:2: the id '1' is that of .*rows\.jsonl:1 too"),
        (({"answer": "a"},), r"rows\.jsonl:1 has neither messages nor prompt \(it has answer\)"),
        (({},), "it has no column at all"),
        (({"prompt": ""},), "has neither messages nor prompt"),
        (({"prompt": 3},), "a conversation is a text or a list of messages, not 3"),
        (({"prompt": "a", "messages": [1]},), "has both messages and prompt"),
        (({"prompt": "a", "answer": 1, "ground_truth": 2},), "has both answer and ground_truth"),
        (({"prompt": "a", "completion": 1},), "completion is 1; it must be a text"),
        (({"prompt": "a", "id": 1.5},), "id is 1.5; it must be"),
        (({"messages": ["hi"]},), "message 0 is 'hi'; it must be an object with role and content"),
        (({"messages": [{"role": "human", "content": "a"}]},), "has the role 'human'; roles are system, user, assistant, tool"),
        (({"messages": [{"role": "user"}]},), "message 0: content is None; it must be a text"),
        (({"messages": [{"role": "user", "content": "a", "weight": 0}]},), "has weight, which would be lost"),
        (({"messages": [{"role": "assistant", "tool_calls": ["f"]}]},), "has the tool call 'f'; it must be"),
    ],
)
def test_bad_rows_are_refused_with_their_place(rows: tuple[Any, ...], match: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=match):
        FileDataset(written(tmp_path, *rows))


def test_bad_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no dataset file absent\.jsonl: correct the path \(relative paths start at /"):
        FileDataset(Path("absent.jsonl"))
    with pytest.raises(DataError, match="convert it, or rename it"):
        FileDataset(tmp_path / "rows.csv")
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1 is not valid JSON: .*utf-8"):
        FileDataset(path)
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(DataError, match="is not a parquet file"):
        FileDataset(tmp_path / "rows.parquet")


def test_bad_parquet_rows_are_refused_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.parquet row 1 has neither"):
        FileDataset(as_parquet(tmp_path, {"prompt": "a"}, {"prompt": None}))
    with pytest.raises(DataError, match=r"row 0: when holds datetime.*\(datetime\), which JSON cannot"):
        FileDataset(as_parquet(tmp_path, {"prompt": "a", "when": datetime(2026, 1, 1)}))
