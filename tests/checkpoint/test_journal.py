from __future__ import annotations

from pathlib import Path

from tandem.checkpoint.journal import Journal
from tandem.types import RewardResult

GOOD = RewardResult(1.0, components={"format": 0.25}, token_rewards=((3, 0.5), (7, -0.5)))
FAILED = RewardResult.failed("no progress for 10 s")


def test_a_result_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    assert journal.get("train:1.0.0") is None
    journal.record({"train:1.0.0": GOOD})
    journal.record({"train:1.1.0": FAILED})
    again = Journal(path)  # the first is still open, as after a kill
    assert (again.get("train:1.0.0"), again.get("train:1.1.0"), len(again)) == (GOOD, FAILED, 2)
    again.record({"train:1.0.0": FAILED})
    again.close()
    journal.close()
    last = Journal(path)
    assert last.get("train:1.0.0") == FAILED
    last.close()


def test_a_torn_last_line_is_as_if_it_had_not_been_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.record({"a": GOOD})
    journal.record({"b": GOOD})
    journal.close()
    path.write_bytes(path.read_bytes()[:-5])
    journal = Journal(path)
    assert (journal.get("a"), journal.get("b")) == (GOOD, None)
    journal.record({"b": FAILED})
    journal.close()
    journal = Journal(path)
    assert journal.get("b") == FAILED
    journal.close()
