"""The package `datasets` is an extra: where it is not installed, what is left is its message."""

import json
import sys
from pathlib import Path

import pytest

from tandem.data.hub import HubConfig, HubDataset
from tandem.errors import DataError
from tandem.types import Message, Task

ROWS = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(4)]


def test_the_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"openai/gsm8k/main/train is read by .*: pip install 'tandem-rl\[datasets\]'"):
        HubDataset(HubConfig("openai/gsm8k", "main"))


def test_a_directory_of_files_and_one_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "several")
    for directory in ("files", "saved", "several"):
        dataset = HubDataset(HubConfig(str(tmp_path / directory)), {"prompt": "question"})
        assert (len(dataset), dataset.name) == (4, directory)
        assert dataset[3] == Task(f"{directory}-3", (Message("user", "3+3"),), "6", directory)
    with pytest.raises(DataError, match=r"files/test cannot be had: .*; correct its name, subset or split"):
        HubDataset(HubConfig(str(tmp_path / "files"), split="test"))
    with pytest.raises(DataError, match=r"no/such/train cannot be had"):
        HubDataset(HubConfig(str(tmp_path / "no/such")))
    with pytest.raises(DataError, match=r"files/train row 0 has neither messages nor prompt \(it has question, answer\)"):
        HubDataset(HubConfig(str(tmp_path / "files")))


def test_a_hub_that_is_not_reached_is_told_from_a_dataset_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    problems = [ConnectionError("Couldn't reach 'a/b'"), datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist")]

    def load_dataset(path: str, subset: str | None, *, split: str) -> None:
        raise problems.pop(0)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DataError, match=r"a/b/train is not here, and the hub is not reached .*: fetch it elsewhere and give the path"
    ):
        HubDataset(HubConfig("a/b"))
    with pytest.raises(DataError, match=r"a/b/train cannot be had: Dataset 'a/b' doesn't exist; correct its name"):
        HubDataset(HubConfig("a/b"))
