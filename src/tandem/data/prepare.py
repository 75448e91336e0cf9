"""Data sets of the field in their own layouts, written as files that a recipe names: train.jsonl and heldout.jsonl.

A row that does not fit is an error with its place; one that cannot be used (a pair of two equal responses) is left out and counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tandem.data.files import FileDataset, Rows, file_rows
from tandem.data.hub import HubConfig, hub_rows
from tandem.errors import DataError
from tandem.types import Json

Row = Mapping[str, object]
Split = str


@dataclass(frozen=True)
class Preparation:
    """One data set. splits: ours to where it is. row: one of its rows as one of ours; None for one that cannot be used.
    reward: the built-in function that judges it; None where nothing is to be judged.
    """

    splits: Mapping[Split, HubConfig]
    row: Callable[[Row], dict[str, Json] | None]
    reward: str | None


@dataclass(frozen=True)
class Prepared:
    """What was written. tasks: in the file. left_out: rows that could not be used."""

    path: Path
    tasks: int
    left_out: int


def prepare(name: str, directory: Path, given: Mapping[Split, Path]) -> list[Prepared]:
    """given: files of the data set's own layout by split; without any it is fetched from the hub, all of it.

    Raises DataError for an unknown name, a row that does not fit, and a file that is there already.
    """
    if name not in PREPARATIONS:
        raise DataError(f"there is no preparation {name!r}; there are {', '.join(PREPARATIONS)}")
    preparation = PREPARATIONS[name]
    if other := sorted(given.keys() - preparation.splits.keys()):
        raise DataError(f"{name} has no {other[0]} split; it has {', '.join(preparation.splits)}")
    sources: dict[Split, Rows] = {split: file_rows(path) for split, path in given.items()}
    if not given:
        sources = {split: hub_rows(place) for split, place in preparation.splits.items()}
    paths = {split: directory / f"{split}.jsonl" for split in sources}
    if there := next((path for path in paths.values() if path.exists()), None):
        raise DataError(f"{there} is there already: remove it, or name another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the directory {directory} cannot be made ({error.strerror}): name another one") from None
    return [_written(paths[split], rows, preparation) for split, rows in sources.items()]


def _written(path: Path, rows: Rows, preparation: Preparation) -> Prepared:
    partial, tasks, left_out = path.with_suffix(".partial.jsonl"), 0, 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for where, row in rows:
                try:
                    made = preparation.row(row)
                except KeyError as missing:
                    raise DataError(f"{where} has no column {missing}; it has {', '.join(row)}") from None
                except ValueError as problem:
                    raise DataError(f"{where}: {problem}") from None
                if made is not None:
                    file.write(json.dumps(made, ensure_ascii=False) + "\n")
                tasks, left_out = tasks + (made is not None), left_out + (made is None)
        FileDataset(partial)  # it reads as data, or says where it does not
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return Prepared(path, tasks, left_out)


def _text(row: Row, name: str) -> str:
    if not isinstance(row[name], str):
        raise ValueError(f"{name} is {row[name]!r}; it must be a text")
    return str(row[name])


def _gsm8k(row: Row) -> dict[str, Json]:
    solution = _text(row, "answer")
    if "####" not in solution:
        raise ValueError(f"the answer ends with no '#### number': {solution[-60:]!r}")
    answer = solution.rpartition("####")[2].strip().replace(",", "")
    prompt = f'{_text(row, "question")}\nThink step by step, and end with "#### " and the number.'
    return {"prompt": prompt, "answer": answer, "solution": solution}


def _math(row: Row) -> dict[str, Json]:
    solution = _text(row, "solution")
    prompt = f"{_text(row, 'problem')}\nThink step by step, and put the final answer in \\boxed{{}}."
    return {"prompt": prompt, "answer": _boxed(solution), "solution": solution, "level": str(row.get("level", ""))}


def _boxed(solution: str) -> str:
    """What the last box holds, whatever braces are in it. Raises ValueError where there is none."""
    begin = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if begin >= 0:
        depth, start = 0, solution.index("{", begin)
        for i in range(start, len(solution)):
            depth += (solution[i] == "{") - (solution[i] == "}")
            if depth == 0:
                return solution[start + 1 : i].strip()
    if found := re.findall(r"\\boxed\s+([^\s$.]+)", solution):  # as a few of the solutions have it
        return found[-1]
    raise ValueError(f"the solution has no answer in \\boxed{{}}: {solution[-60:]!r}")


def _aime(row: Row) -> dict[str, Json]:
    named = {key.lower(): value for key, value in row.items()}
    prompt = f"{_text(named, 'problem')}\nThink step by step, and put the final answer in \\boxed{{}}."
    return {"prompt": prompt, "answer": str(named["answer"])}


def _humaneval(row: Row) -> dict[str, Json]:
    prompt = f"Complete this function. Answer with all of it in one block.\n```python\n{_text(row, 'prompt')}```"
    answer = f"{_text(row, 'test')}\ncheck({_text(row, 'entry_point')})\n"
    return {"prompt": prompt, "answer": answer, "id": _text(row, "task_id")}


def _mbpp(row: Row) -> dict[str, Json]:
    tests = row["test_list"]
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"test_list is {tests!r}; it must be a list of asserts")
    asserts = [str(test) for test in cast("list[object]", tests)]
    setup = row.get("test_setup_code") or "\n".join(cast("list[str]", row.get("test_imports") or []))
    what = _text(row, "text" if "text" in row else "prompt")
    prompt = f"{what}\nAnswer with one block of Python. It must pass these tests:\n```python\n" + "\n".join(asserts) + "\n```"
    return {"prompt": prompt, "answer": [f"{setup}\n{test}" if setup else test for test in asserts], "id": str(row["task_id"])}


def _preferences(row: Row) -> dict[str, Json] | None:
    if row["chosen"] == row["rejected"]:
        return None
    pair = {name: cast("Json", row[name]) for name in ("chosen", "rejected")}
    return {"prompt": _text(row, "prompt"), **pair} if row.get("prompt") else pair


PREPARATIONS: dict[str, Preparation] = {
    "gsm8k": Preparation(
        {"train": HubConfig("openai/gsm8k", "main"), "heldout": HubConfig("openai/gsm8k", "main", "test")}, _gsm8k, "numeric"
    ),
    "math": Preparation(
        {
            "train": HubConfig("DigitalLearningGmbH/MATH-lighteval"),
            "heldout": HubConfig("DigitalLearningGmbH/MATH-lighteval", split="test"),
        },
        _math,
        "math",
    ),
    "aime": Preparation({"heldout": HubConfig("HuggingFaceH4/aime_2024")}, _aime, "math"),
    "humaneval": Preparation({"heldout": HubConfig("openai/openai_humaneval", split="test")}, _humaneval, "code"),
    "mbpp": Preparation(
        {
            "train": HubConfig("google-research-datasets/mbpp", "full"),
            "heldout": HubConfig("google-research-datasets/mbpp", "full", "test"),
        },
        _mbpp,
        "code",
    ),
    "preferences": Preparation(
        {
            "train": HubConfig("HuggingFaceH4/ultrafeedback_binarized", split="train_prefs"),
            "heldout": HubConfig("HuggingFaceH4/ultrafeedback_binarized", split="test_prefs"),
        },
        _preferences,
        None,
    ),
}
