from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.data.curriculum import CurriculumConfig, by_pass_rate
from tandem.data.fake import FakeDataset
from tandem.errors import DataError
from tandem.types import Message, Task


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rated(*rates: Any) -> FakeDataset:
    return FakeDataset([Task(str(i), (Message("user", str(i)),), info={"pass_rate": rate}) for i, rate in enumerate(rates)])


def ids(dataset: Any) -> list[str]:
    return [dataset[i].id for i in range(len(dataset))]


def test_rates_come_from_the_samples_of_a_run(tmp_path: Path) -> None:
    """Task 0 is solved always, 1 half the time, 2 never, 3 could not be judged, 4 was not sampled."""
    rewards: list[tuple[str, float | None]] = [("0", 1.0), ("0", 1.5), ("1", 1.0), ("1", 0.9), ("1", None), ("2", 0.0), ("3", None)]
    path = written(
        tmp_path / "samples.jsonl", *({"task": f"fake-{task}", "reward": reward, "text": "x"} for task, reward in rewards)
    )
    dataset = FakeDataset(size=5)
    kept = by_pass_rate(dataset, CurriculumConfig(rates=path, least=0.1, most=0.9))
    assert ids(kept) == ["fake-1"]
    assert kept.notes == ("4 of 5 tasks of fake have no pass rate from 0.1 to 0.9 and are left out",)
    assert ids(by_pass_rate(dataset, CurriculumConfig(rates=path))) == ["fake-0", "fake-1", "fake-2"]
    assert ids(by_pass_rate(dataset, CurriculumConfig(rates=path, solved=0.5, most=0.99))) == ["fake-2"]


def test_the_easy_ones_come_first_and_equals_in_their_order() -> None:
    dataset = rated(0.5, 1, 0.0, 0.5, None)
    assert ids(by_pass_rate(dataset, CurriculumConfig(easy_first=True))) == ["1", "0", "3", "2"]
    assert ids(by_pass_rate(dataset, CurriculumConfig())) == ["0", "1", "2", "3"]


def test_rates_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task '0' has pass_rate 50; it must be a number from 0 to 1"):
        by_pass_rate(rated(50), CurriculumConfig())
    with pytest.raises(DataError, match=r"all 2 tasks of fake have no pass rate from 0\.9 to 1, and none is left"):
        by_pass_rate(rated(0.5, None), CurriculumConfig(least=0.9))
    with pytest.raises(DataError, match=r"samples\.jsonl:1 needs task \(an id\) and reward .*; it has id, score"):
        by_pass_rate(rated(0.5), CurriculumConfig(rates=written(tmp_path / "samples.jsonl", {"id": "0", "score": 1})))
    with pytest.raises(ValueError, match=r"least=0\.9 and most=0\.1 are no range"):
        CurriculumConfig(least=0.9, most=0.1)
