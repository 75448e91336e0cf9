from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tandem.track.samples import SampleLog, SampleRecord
from tandem.types import Episode, Key, Message, PolicyRef, RewardResult, Sample, Task
from tests.track.episodes import episode


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_an_episode(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl")
    log.write([SampleRecord.of(episode(7, "395", RewardResult(1.0, components={"format": 0.5}))).line()], step=3)
    log.close()
    assert lines(tmp_path / "samples.jsonl") == [
        {
            "step": 3,
            "key": "train:7.0.0",
            "task": "task-7",
            "prompt": "17 * 23 + 4 =",
            "text": "395",
            "answer": "395",
            "reward": 1.0,
            "stop": "stop",
            "policy": "policy@0.2",
            "tokens": 2,
            "components": {"format": 0.5},
        }
    ]


def test_a_failed_reward_is_null_with_its_reason_and_an_unjudged_one_null(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl")
    failed = episode(1, "a", RewardResult.failed("no progress for 10 s"))
    lost = replace(episode(3, "", None), samples=(), error="the agent failed")
    log.write([SampleRecord.of(each).line() for each in [failed, episode(2, "b", None), lost]], step=1)
    log.close()
    judged = [(line["reward"], line.get("reason"), line["policy"], line["tokens"]) for line in lines(tmp_path / "samples.jsonl")]
    assert judged == [
        (None, "no progress for 10 s", "policy@0.2", 2),
        (None, None, "policy@0.2", 2),
        (None, "the agent failed", None, 0),
    ]


def test_the_oldest_policy_of_all_branches_is_named() -> None:
    first = episode(1, "a", None)
    older = ((PolicyRef(version=3), 1), (PolicyRef(version=1), 1))
    branch = Sample(Key("train", 1, 0, 1), [5, 6], [True, True], [-1.0, -1.0], older, "stop")  # type: ignore[arg-type]
    record = SampleRecord.of(replace(first, samples=(*first.samples, branch)))
    assert (record.policy, record.tokens) == (PolicyRef(version=1), 4)


def test_turns_that_the_policy_did_not_write_are_marked() -> None:
    prompt = (Message("system", "Be brief."), Message("user", "17 * 23?"))
    turns = (Message("assistant", "calc(17*23)"), Message("tool", "391"), Message("assistant", "391"))
    talk = Episode(Key("train", 0), Task("t", prompt), (), prompt + turns, "stop")
    record = SampleRecord.of(talk)
    assert record.prompt == "[system] Be brief.\n17 * 23?"
    assert record.text == "calc(17*23)\n[tool] 391\n391"


def test_restoring_forgets_later_lines(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl")
    log.write([SampleRecord.of(episode(1, "a", None)).line()], step=1)
    state = log.state()
    log.write([SampleRecord.of(episode(2, "b", None)).line()], step=2)
    log.close()
    log = SampleLog(tmp_path / "samples.jsonl")
    log.restore(state)
    log.write([SampleRecord.of(episode(2, "c", None)).line()], step=2)
    log.close()
    assert [line["text"] for line in lines(tmp_path / "samples.jsonl")] == ["a", "c"]
