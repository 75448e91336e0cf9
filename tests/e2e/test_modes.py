"""The asynchronous modes on the same loop: how old samples are. Where such a run is killed: tests/faults.

What such a run samples depends on timing; what it must keep does not: groups are trained on once and in the order of their
admission, and none is older than the staleness says.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import REWARD, forked, read_lines, tandem, write_recipe

STEPS, GROUPS, SIZE = 6, 2, 4
SLOW = REWARD.replace("def digits", "import time\n\ndef digits").replace("    return", "    time.sleep(0.1)\n    return")
"""One group at a time is judged, so that others wait for it while a step is trained and a snapshot made."""

MODES = {
    "colocate_async": ("trainer.mode=colocate_async",),
    "separate_async": ("trainer.mode=separate_async",),
}


def command(directory: Path, mode: str, *more: str) -> list[str]:
    return [
        *("train", str(write_recipe(directory, reward=SLOW)), f"run.dir={directory / 'run'}", f"trainer.steps={STEPS}"),
        *("algorithm.correction=token_tis", *MODES[mode], *more),
    ]


def check(run: Path, staleness: int) -> None:
    """Each step once, each group once and in order, nothing older than allowed, and the oldest as old as that."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    samples = [
        (line["step"], *map(int, line["key"].removeprefix("train:").split("."))) for line in read_lines(run / "samples.jsonl")
    ]
    expected = [(1 + ordinal // GROUPS, ordinal, member, 0) for ordinal in range(STEPS * GROUPS) for member in range(SIZE)]
    assert samples == expected
    ages = range(staleness + 1)
    for line in lines:
        counts = [line[f"staleness/rows_of_age_{age}"] for age in ages]
        assert sum(counts) == GROUPS * SIZE
        assert f"staleness/rows_of_age_{staleness + 1}" not in line
        assert line["staleness/mean"] == pytest.approx(
            sum(age * count for age, count in zip(ages, counts, strict=True)) / sum(counts)
        )
        assert "reward/mean" in line
        assert line["time/generation_idle_s"] >= 0
        if counts[0] == sum(counts):
            assert line["mismatch/max"] == 0

    spans = [event["name"] for event in json.loads((run / "trace.json").read_text()) if event["ph"] == "X"]
    assert [name for name in spans if name.startswith("update ")] == [f"update {step}" for step in range(1, STEPS + 1)]
    groups = {f"train:{ordinal}" for ordinal in range(STEPS * GROUPS)}
    assert groups <= {name.removeprefix("judge ") for name in spans if name.startswith("judge ")}
    assert "generate" in spans


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_mode_overlaps_within_its_staleness(mode: str, staleness: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked(command(tmp_path, mode, f"trainer.staleness={staleness}"), log) == 0, log.read_text()
    check(tmp_path / "run", staleness)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("staleness/rows_of_age_1", 0) for line in lines) > 0, "something was sampled ahead"


def test_trainers_are_lent_while_they_wait_and_what_they_sample_is_trained_on(tmp_path: Path) -> None:
    """By a rule, so that how often depends on timing; all else is as without."""
    log = tmp_path / "log"
    assert forked(command(tmp_path, "separate_async", "rollout.lend=true", "checkpoint=collective"), log) == 0, log.read_text()
    check(tmp_path / "run", 1)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert lines[0]["lend/decided"] == 0
    assert lines[1]["lend/decided"] == 1
    assert lines[1]["lend/predicted_s"] == pytest.approx(lines[0]["lend/waited_s"])
    assert all(line["publish/left_out"] == 0 for line in lines)
    for line in lines:
        assert ("lend/cost_s" in line) == line["lend/decided"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["trainer.mode=separate_async", "runtime=inline"], "say runtime=process instead of inline"),
        (["trainer.mode=colocate_async", "trainer.staleness=0"], "for 0 use trainer.mode=sync"),
        (["trainer.staleness=1"], "contradicts trainer.mode=sync"),
        (["rollout.lend=true"], "only in separate_async do trainers wait while engines sample"),
        (
            ["trainer.mode=separate_async", "rollout.lend=true", "runtime.pools={trainer: 2}"],
            "Give it one, runtime.pools={trainer: 1}",
        ),
        (["trainer.mode=colocate_async", "trainer.window=1"], "say what becomes of them"),
        (["trainer.mode=colocate_async", "trainer.window=1", "trainer.too_old=correct"], "grpo does not correct for it"),
        (["trainer.mode=colocate_async", "rollout.spare_groups=1"], "spare_groups=1 is of trainer.mode=sync"),
        (["queue=durable", "rollout.spare_groups=1"], "set rollout.spare_groups=0, or queue.name=memory"),
        (
            ["queue=durable", "trainer.mode=colocate_async", "trainer.window=1", "trainer.too_old=drop"],
            "set trainer.window=0, or queue.name=memory",
        ),
        (["rollout.enough_episodes=1"], "enough_episodes=1 is below the 2 episodes that grpo compares"),
        (["trainer.mode=colocate_async", "trainer.staleness=9999"], "queue.max_groups=4096 is below the 20000 groups"),
    ],
)
def test_a_mode_that_cannot_be_is_refused(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tandem("train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}", *arguments) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_critic_is_trained_alone_for_as_many_steps_as_it_says(tmp_path: Path) -> None:
    """Of the run, however old the samples are."""
    critic = ("algorithm=ppo", "critic.warmup_steps=2", "trainer.staleness=2")
    assert forked(command(tmp_path, "colocate_async", *critic), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "critic/loss" in line]
    assert ["train/loss" in line for line in lines] == [False] * 2 + [True] * (STEPS - 2)


def test_a_run_is_not_resumed_with_less_staleness_than_its_samples_may_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tmp_path, "colocate_async", "trainer.staleness=2", "trainer.steps=3")
    assert forked(arguments, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    for less in (("trainer.mode=sync", "trainer.staleness=null"), ("trainer.staleness=1",)):
        assert tandem(*arguments, *less, "trainer.steps=4", "--resume") == 2
        assert "resume with trainer.mode=colocate_async trainer.staleness=2, or more" in " ".join(capsys.readouterr().err.split())
    assert tandem(*arguments, "trainer.staleness=3", "trainer.steps=4", "--resume") == 0
