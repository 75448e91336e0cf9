"""Each reward manager that docs/guides/rewards.md names: its line of that page trains, and does what it is there for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import read_lines, tandem, write_recipe
from tests.e2e.test_rewards import Judge, judging

PAGE = Path(__file__).parents[2] / "docs/guides/rewards.md"
TABLE = dict(
    re.findall(r"^\| ([a-z-]+) \| `(.+?)` \|", PAGE.read_text(encoding="utf-8").partition("## Reward managers by name")[2], re.M)
)
"""Overrides by the manager's name."""

REWARD = """
def share(text):
    return sum(c.isdigit() for c in text) / max(len(text), 1)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": share(solution_str), "asked": 1.0}

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": share(text), "asked": len(solution_strs)} for text in solution_strs]
"""
PER_MINUTE = 1200.0

Lines = list[dict[str, Any]]


def one_call_an_episode(steps: Lines, _: Judge) -> None:
    assert {line["reward/asked"] for line in steps} == {1.0}


def one_call_a_group(steps: Lines, _: Judge) -> None:
    assert {line["reward/asked"] for line in steps} == {4.0}


def long_answers_cost(steps: Lines, _: Judge) -> None:
    assert all(line["reward/shaped"] < line["reward/mean"] for line in steps)


def each_part_is_credited(steps: Lines, _: Judge) -> None:
    assert all(line.keys() >= {"reward/right", "reward/form"} for line in steps)


def calls_are_spaced(_: Lines, judge: Judge) -> None:
    gaps_s = [after - before for before, after in pairwise(judge.began_s)]
    assert len(gaps_s) >= 4
    # The calls leave evenly spaced; one may arrive late and the next in time, but the mean cannot be less.
    assert sum(gaps_s) >= len(gaps_s) * 60 / PER_MINUTE * 0.9


def refusals_are_tried_again(_: Lines, judge: Judge) -> None:
    assert judge.busy == 0
    assert len(judge.began_s) > 2 * 2  # two steps of two groups, and the refusals


DOES: dict[str, Callable[[Lines, Judge], None]] = {
    "naive": one_call_an_episode,
    "batch": one_call_a_group,
    "dapo": long_answers_cost,
    "gdpo": each_part_is_credited,
    "rate-limited": calls_are_spaced,
    "remote": refusals_are_tried_again,
}


def test_the_page_names_all_of_them() -> None:
    assert TABLE.keys() == DOES.keys()


@pytest.mark.parametrize("name", DOES)
def test_a_recipe_with_it_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    Path("my_reward.py").write_text(REWARD)
    with judging(busy=3 if name == "remote" else 0) as judge:
        override = TABLE[name].replace("http://localhost:8000/score", judge.url)
        override = override.replace("per_minute: 60", f"per_minute: {PER_MINUTE}").replace("4096", "8")
        assert tandem("train", "tiny.yaml", "run.dir=run", "warmup=null", "trainer.steps=2", *shlex.split(override)) == 0
    steps = [line for line in read_lines(Path("run/metrics.jsonl")) if "train/grad_norm" in line]
    assert len(steps) == 2
    assert all(line["train/grad_norm"] > 0 for line in steps)
    unjudged = [line["reason"] for line in read_lines(Path("run/samples.jsonl")) if line["reward"] is None]
    assert all(reason.endswith("'it has an off day'") for reason in unjudged), unjudged  # the judge says so of one
    DOES[name](steps, judge)
