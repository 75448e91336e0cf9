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
        (({"prompt": ""},), "rows.jsonl:1: prompt is empty, so that there is nothing to ask"),
        (({"messages": None},), "messages is empty"),
        (({"prompt": "a\ud800"},), r"rows.jsonl:1 has half a character, '\\ud800'"),
        (({"prompt": [{"role": "user", "content": "\udfff"}]},), "message 0: content has half a character"),
        (({"prompt": "a", "completion": "\ud800"},), "completion has half a character"),
        (({"prompt": "a", "answer": [{"\ud800": 1}]},), "answer has half a character"),
        (({"prompt": "a", "level": {"b": "\ud800"}},), "level has half a character"),
        (('{"prompt": "a", "answer": ' + "[" * 600 + "]" * 600 + "}",), "rows.jsonl:1 is nested too deeply"),
        (('{"prompt": "a", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",), "rows.jsonl:1 is nested too deeply"),
        (({"messages": '[{"role": "user", "content": "hi"}]'},), "a list of messages is written as one text"),
        (({"prompt": "[{'content': 'hi', 'role': 'user'}]"},), "a list of messages is written as one text"),
        (({"prompt": 3},), "a conversation is a text or a list of messages, not 3"),
        (({"prompt": "a", "messages": [1]},), "has both messages and prompt"),
        (({"prompt": "a", "answer": 1, "ground_truth": 2},), "has both answer and ground_truth"),
        (({"prompt": "a", "completion": 1},), "completion: a conversation is a text or a list of messages, not 1"),
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
        FileDataset(tmp_path / "rows.txt")
    with pytest.raises(DataError, match="is a directory: give one of its files"):
        FileDataset(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1 is not UTF-8"):
        FileDataset(path)
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(DataError, match="is not a parquet file"):
        FileDataset(tmp_path / "rows.parquet")


def test_bad_parquet_rows_are_refused_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.parquet row 1: prompt is empty"):
        FileDataset(as_parquet(tmp_path, {"prompt": "a"}, {"prompt": None}))
    with pytest.raises(DataError, match=r"row 0: when holds datetime.*\(datetime\), which JSON cannot"):
        FileDataset(as_parquet(tmp_path, {"prompt": "a", "when": datetime(2026, 1, 1)}))


USER, OTHER = {"role": "user", "content": "2+2"}, {"role": "user", "content": "3+3"}
RIGHT, WRONG = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
PAIR = Task("rows-0", (Message("user", "2+2"),), None, "rows", {}, (Message("assistant", "4"),), (Message("assistant", "5"),))


@pytest.mark.parametrize("write", [written, as_parquet])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
        {"messages": [USER], "chosen": "4", "rejected": "5"},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": "2+2", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    ],
    ids=["texts", "messages", "after messages", "implicit prompt", "prompt repeated"],
)
def test_each_way_to_write_a_pair_is_the_same_pair(write: Any, row: dict[str, Any], tmp_path: Path) -> None:
    assert FileDataset(write(tmp_path, row))[0] == PAIR


def test_a_pair_keeps_its_other_columns_under_other_names_and_over_several_turns(tmp_path: Path) -> None:
    more = [USER, WRONG, {"role": "user", "content": "sure?"}]
    rows = [
        {"question": more, "good": "no", "bad": "yes", "margin": 0.5},
        {"question": [USER], "good": [RIGHT, {"role": "tool", "content": "ok"}, RIGHT], "bad": [WRONG], "margin": 0},
    ]
    dataset = FileDataset(written(tmp_path, *rows), {"prompt": "question", "chosen": "good", "rejected": "bad"})
    assert dataset[0].messages == (Message("user", "2+2"), Message("assistant", "5"), Message("user", "sure?"))
    assert dataset[0].info == {"margin": 0.5}
    assert [message.role for message in dataset[1].chosen] == ["assistant", "tool", "assistant"]
    assert dataset[0].asked() == dataset[0]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "2+2", "chosen": "4"}, r"rows.jsonl:1 lacks rejected of its pair \(it has prompt, chosen\)"),
        ({"prompt": "2+2", "rejected": "4", "good": "5"}, "lacks chosen .*columns="),
        ({"prompt": "2+2", "chosen": "4", "rejected": "4"}, "chosen and rejected are the same"),
        ({"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}, "chosen and rejected are the same"),
        ({"chosen": "4", "rejected": "5"}, "chosen is a text, and there is no prompt"),
        (
            {"chosen": [USER, RIGHT], "rejected": [OTHER, WRONG]},
            "prompts of chosen and rejected differ",
        ),
        ({"chosen": [USER, RIGHT], "rejected": [USER, RIGHT, USER, WRONG]}, "differ: after 2 .* chosen goes on with nothing"),
        ({"prompt": "3+3", "chosen": [USER, RIGHT], "rejected": "5"}, "chosen is a conversation with another prompt"),
        ({"prompt": "2+2", "chosen": [USER], "rejected": "5"}, "rows.jsonl:1: chosen holds no response"),
        ({"prompt": "2+2", "chosen": [], "rejected": "5"}, "rows.jsonl:1: chosen holds no response"),
        ({"prompt": "2+2", "chosen": "4", "rejected": None}, "rows.jsonl:1: rejected is null"),
        ({"prompt": "2+2", "completion": "4", "chosen": "4", "rejected": "5"}, "both completion and chosen"),
        ({"prompt": "2+2", "chosen": 4, "rejected": "5"}, "chosen: a conversation is a text or a list"),
    ],
)
def test_what_is_no_pair_says_why(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        FileDataset(written(tmp_path, row))


def test_a_completion_may_be_a_list_of_messages(tmp_path: Path) -> None:
    dataset = FileDataset(written(tmp_path, {"prompt": [USER], "completion": [RIGHT]}))
    assert dataset[0].messages == (Message("user", "2+2"), Message("assistant", "4"))


def as_csv(path: Path, text: str) -> Path:
    (path / "rows.csv").write_text(text, encoding="utf-8-sig")  # as a spreadsheet writes it
    return path / "rows.csv"


def test_csv_cells_stay_the_texts_that_they_are(tmp_path: Path) -> None:
    text = 'id,prompt,answer,level\n7,"one, ""two""\nthree",007,\n8,é,1e3,2\n'
    dataset = FileDataset(as_csv(tmp_path, text))
    assert dataset[0] == Task("7", (Message("user", 'one, "two"\nthree'),), "007", "rows", {"level": None})
    assert dataset[1] == Task("8", (Message("user", "é"),), "1e3", "rows", {"level": "2"})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "rows.csv is empty"),
        ("prompt,answer\n", "rows.csv is empty"),
        ("prompt,answer\na,1\nb, c,2\n", r"rows\.csv:3 has 3 cells, and the first line names 2 columns"),
        ("prompt,answer\na\n", r"rows\.csv:2 has 1 cells"),
        ("prompt,prompt\na,b\n", "names the column 'prompt' twice"),
        ('prompt\n"a\n', r"rows\.csv:2 is not CSV in UTF-8: unexpected end of data"),
        ("prompt,answer\n,1\n", r"rows\.csv:2: prompt is empty"),
    ],
)
def test_bad_csv_is_refused_with_its_place(text: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=match):
        FileDataset(as_csv(tmp_path, text))


def test_csv_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("prompt\né\n".encode("latin-1"))
    with pytest.raises(DataError, match="is not CSV in UTF-8"):
        FileDataset(tmp_path / "rows.csv")


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}


@pytest.mark.parametrize("write", [written, as_parquet])
def test_verls_layout_is_read_as_it_is(write: Any, tmp_path: Path) -> None:
    info = {"ability": "math", "reward_model": {"style": "rule"}, "extra_info": {"index": 7, "split": "train"}}
    task = FileDataset(write(tmp_path, VERL))[0]
    assert task == Task("rows-0", (Message("user", "2+2"),), "4", "openai/gsm8k", info)
    assert task.chat


def test_a_reward_model_column_that_is_not_verls_stays_what_it_is(tmp_path: Path) -> None:
    assert FileDataset(written(tmp_path, {"prompt": "a", "reward_model": "rm-1"}))[0].info == {"reward_model": "rm-1"}
    assert not FileDataset(written(tmp_path, {"prompt": "a", "reward_model": {"style": "rule"}}))[0].chat


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (VERL | {"answer": "4"}, "has both answer and reward_model.ground_truth"),
        (VERL | {"ground_truth": "4"}, "has both ground_truth and reward_model.ground_truth"),
        (VERL | {"data_source": 3}, "data_source is 3; it must be a text"),
    ],
)
def test_verls_layout_with_something_beside_it_is_refused(row: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=match):
        FileDataset(written(tmp_path, row))
