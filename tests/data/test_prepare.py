"""Small files in the layouts of the data sets: what becomes of them, and that the reward named for them finds them right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.data.files import FileDataset
from tandem.data.prepare import PREPARATIONS, Prepared, prepare
from tandem.errors import DataError
from tandem.rewards.child import load
from tandem.types import Episode, Key, Message

ROWS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "gsm8k": (
        {"question": "Ann has 3 apples and buys 1,200. How many?", "answer": "3 + 1200 = <<3+1200=1203>>1203\n#### 1,203"},
        "1203",
        "So she has\n#### 1203",
    ),
    "math": (
        {"problem": "Halve 1.", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{\\frac{1}{2}}$."},
        "\\frac{1}{2}",
        "\\boxed{0.5}",
    ),
    "aime": ({"ID": "2024-I-1", "Problem": "Find it.", "Solution": "...", "Answer": 204}, "204", "\\boxed{204}"),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def twice(x):\n    ",
            "entry_point": "twice",
            "canonical_solution": "return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        },
        "def check(candidate):\n    assert candidate(2) == 4\n\ncheck(twice)\n",
        "```python\ndef twice(x):\n    return 2 * x\n```",
    ),
    "mbpp": (
        {
            "task_id": 2,
            "text": "Double it.",
            "code": "...",
            "test_list": ["assert twice(2) == 4"],
            "test_setup_code": "import math",
        },
        ["import math\nassert twice(2) == 4"],
        "```python\ndef twice(x):\n    return 2 * x\n```",
    ),
}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_tasks_that_the_named_reward_judges(name: str, tmp_path: Path) -> None:
    row, answer, right = ROWS[name]
    (done,) = prepare(name, tmp_path / "out", {"heldout": written(tmp_path / "raw.jsonl", row)})
    assert done == Prepared(tmp_path / "out" / "heldout.jsonl", 1, 0)
    task = FileDataset(done.path)[0]
    assert task.answer == answer
    reward = PREPARATIONS[name].reward
    assert reward is not None
    if reward == "math":
        pytest.importorskip("math_verify")
    params = {"sandbox": "process"} if reward == "code" else {}
    group = [Episode(Key("a", 0), task, (), (*task.messages, Message("assistant", text)), "stop") for text in (right, "7 no")]
    values = [getattr(result, "value", result) for result in load(reward, params)(task, group)]
    assert values == [1, 0]


def test_preferences_are_pairs_without_those_that_are_equal(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    worse = [talk[0], {"role": "assistant", "content": "No."}]
    rows = [
        {"prompt": "Hi", "chosen": talk, "rejected": worse, "score_chosen": 8.0},
        {"prompt": "Hi", "chosen": talk, "rejected": talk},
    ]
    (done,) = prepare("preferences", tmp_path, {"train": written(tmp_path / "raw.jsonl", *rows)})
    assert (done.tasks, done.left_out) == (1, 1)
    task = FileDataset(done.path)[0]
    assert [task.chosen[0].content, task.rejected[0].content] == ["Hello!", "No."]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("\\boxed{1} and then \\boxed{\\sqrt{\\frac{a}{b}}}.", "\\sqrt{\\frac{a}{b}}"),
        ("$\\boxed 7$.", "7"),
        ("\\fbox{x}", "x"),
    ],
)
def test_the_last_box_is_the_answer_of_math(solution: str, answer: str, tmp_path: Path) -> None:
    raw = written(tmp_path / "raw.jsonl", {"problem": "P", "solution": solution})
    prepare("math", tmp_path, {"train": raw})
    assert FileDataset(tmp_path / "train.jsonl")[0].answer == answer


@pytest.mark.parametrize(
    ("name", "row", "match"),
    [
        ("gsm8k", {"question": "Q"}, r"raw\.jsonl:1 has no column 'answer'; it has question"),
        ("gsm8k", {"question": "Q", "answer": "7"}, r"raw\.jsonl:1: the answer ends with no '#### number'"),
        ("gsm8k", {"question": 3, "answer": "#### 7"}, "question is 3; it must be a text"),
        ("math", {"problem": "P", "solution": "7 { }"}, r"has no answer in \\boxed\{\}"),
        ("mbpp", {"task_id": 1, "text": "T", "test_list": []}, r"test_list is \[\]"),
        ("preferences", {"prompt": "P", "chosen": "a", "rejected": None}, "rejected is null"),
        ("gsm9k", {}, "there is no preparation 'gsm9k'; there are gsm8k, math"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(name: str, row: dict[str, Any], match: str, tmp_path: Path) -> None:
    raw = written(tmp_path / "raw.jsonl", row)
    with pytest.raises(DataError, match=match):
        prepare(name, tmp_path / "out", {"train": raw})
    assert not list(tmp_path.glob("out/*"))


def test_a_split_that_it_has_not_and_a_file_that_is_there_are_refused(tmp_path: Path) -> None:
    raw = written(tmp_path / "raw.jsonl", ROWS["gsm8k"][0])
    with pytest.raises(DataError, match="aime has no train split; it has heldout"):
        prepare("aime", tmp_path, {"train": raw})
    prepare("gsm8k", tmp_path, {"train": raw})
    with pytest.raises(DataError, match=r"train\.jsonl is there already: remove it"):
        prepare("gsm8k", tmp_path, {"train": raw})
