"""What every Dataset promises."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tandem.data.builtin import Demonstrations, Pairs, TaskSet
from tandem.data.fake import FakeDataset
from tandem.data.files import FileDataset
from tandem.data.selection import Kept, Mixture
from tandem.data.tasks import TASKS
from tandem.data.tasks.calculator import Calculator
from tandem.ports import Dataset
from tandem.registry import resolve

ROWS = [{"id": f"t{i}", "prompt": f"ask {i}", "answer": str(i)} for i in range(8)]


def jsonl(path: Path) -> Dataset:
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return FileDataset(path / "rows.jsonl")


def parquet(path: Path) -> Dataset:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path / "rows.parquet")
    return FileDataset(path / "rows.parquet")


def csv(path: Path) -> Dataset:
    (path / "rows.csv").write_text("id,prompt,answer\n" + "".join(",".join(row.values()) + "\n" for row in ROWS))
    return FileDataset(path / "rows.csv")


def kept(_: Path) -> Dataset:
    return Kept(FakeDataset(size=16), lambda task: int(task.messages[0].content) % 2 == 0, "odd numbers")


DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "fake": lambda _: FakeDataset(),
    "jsonl": jsonl,
    "parquet": parquet,
    "csv": csv,
    "kept": kept,
    "mixture": lambda _: Mixture([FakeDataset(size=2), FakeDataset(size=3)], [1.0, 3.0]),
    "demonstrations": lambda _: Demonstrations(Calculator, size=8),
    "pairs": lambda _: Pairs(Calculator, "train", size=8),
    **{name: lambda _, name=name: TaskSet(resolve(name, TASKS), "train", size=8) for name in TASKS},
}


@pytest.fixture(params=DATASETS)
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    return DATASETS[request.param](tmp_path)


def test_has_a_name_and_a_length(dataset: Dataset) -> None:
    assert dataset.name
    assert len(dataset) == 8


def test_a_position_always_holds_the_same_task(dataset: Dataset) -> None:
    assert [dataset[i] for i in (7, 3, 3)] == [dataset[i] for i in (7, 3, 3)]


def test_ids_are_unique_and_every_task_asks_something(dataset: Dataset) -> None:
    tasks = [dataset[i] for i in range(len(dataset))]
    assert len({task.id for task in tasks}) == 8
    assert all(task.messages and task.messages[0].content for task in tasks)


def test_there_is_nothing_beyond_the_end(dataset: Dataset) -> None:
    with pytest.raises(IndexError):
        dataset[8]
