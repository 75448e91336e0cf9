"""Every objective of a dataset through the real loop: its held-out loss falls within some steps.

The good response repeats a digit and the bad one does not. One tiny model is warmed up once, on both alike; the teacher has
seen good ones alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tandem.algos.columns import reads
from tandem.algos.table import ALGORITHMS
from tandem.models.hf import load_value_model
from tests.e2e.runs import read_lines, tandem

pytestmark = pytest.mark.slow

RECIPE = """
model: {path: MODEL}
data:
  train: {path: DIRECTORY/train.jsonl}
  heldout: {path: DIRECTORY/heldout.jsonl}
rollout: {groups_per_step: 32, group_size: 1}
engine: {max_context: 32}
train: {lr: 3.0e-3, micro_batch_tokens: 1024}
trainer: {steps: 12, eval_every: 100, snapshot_every: 100}
logs: []
"""
SHAPE = "model={path: null, new: {hidden_size: 32, intermediate_size: 64, num_layers: 1, num_heads: 2, max_positions: 32}}"
SFT = ("algorithm=sft", "data.train.columns={completion: good}")
DATASET = [
    name for name, row in ALGORITHMS.items() if row.advantage is None and not row.needs & {"rollout_logprobs", "rewards", "returns"}
]
PAIRS = [name for name in DATASET if "chosen" in ALGORITHMS[name].needs]
TAUGHT = [name for name in DATASET if "teacher_topk_ids" in reads(ALGORITHMS[name])]


def write(path: Path, seed: int, num: int) -> None:
    random = Random(seed)

    def row() -> dict[str, str]:
        digit, other = random.sample("0123456789", 2)
        good, bad = digit * 3, digit + other + digit
        return {"prompt": f"{random.randrange(100)}=", "good": good, "bad": bad, "either": random.choice([good, bad])}

    path.write_text("".join(json.dumps(row()) + "\n" for _ in range(num)))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("datasets")
    write(directory / "train.jsonl", 0, 512)
    write(directory / "heldout.jsonl", 1, 48)
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(directory / "warm/final")).replace("DIRECTORY", str(directory)))
    either = ("algorithm=sft", "data.train.columns={completion: either}", "data.heldout={path: null, task: arithmetic, size: 8}")
    assert tandem("train", str(path), f"run.dir={directory / 'warm'}", "trainer.steps=60", "train.lr=0.01", SHAPE, *either) == 0
    assert tandem("train", str(path), f"run.dir={directory / 'teacher'}", "data.heldout=null", *SFT) == 0
    return path


def overrides(name: str, recipe: Path) -> list[str]:
    found = [f"algorithm={name}"]
    if name in TAUGHT:
        found.append(f"teacher.path={recipe.parent / 'teacher/final'}")
    columns = "columns={chosen: good, rejected: bad}" if name in PAIRS else "columns={completion: good}"
    found += [f"data.train.{columns}", f"data.heldout.{columns}"]
    return found


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("name", DATASET)
def test_its_held_out_loss_falls(name: str, recipe: Path, tmp_path: Path) -> None:
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'run'}", *overrides(name, recipe)) == 0
    before, after = summary(tmp_path / "run")["eval_before"], summary(tmp_path / "run")["eval_after"]
    assert after["loss"] < 0.9 * before["loss"]
    assert before["n"] == after["n"] == 48
    steps = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if "train/loss" in line]
    if name in PAIRS:
        assert before["preference_accuracy"] == before["reward_margin"] == steps[0]["train/reward_margin"] == 0
        assert after["preference_accuracy"] > 0.8
        assert after["reward_margin"] > 0


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_a_killed_run_of_pairs_goes_on_to_the_same_weights(name: str, recipe: Path, tmp_path: Path) -> None:
    """The reference is the policy as the run began, whoever goes on with it; a value model has its head."""
    constant = ["train.schedule=constant", *overrides(name, recipe)]
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'whole'}", "trainer.steps=4", *constant) == 0
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'parts'}", "trainer.steps=2", *constant) == 0
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'parts'}", "trainer.steps=4", "--resume", *constant) == 0
    assert summary(tmp_path / "parts")["weights"] == summary(tmp_path / "whole")["weights"]


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_a_finished_run_is_measured_again(name: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'run'}", "trainer.steps=2", *overrides(name, recipe)) == 0
    capsys.readouterr()
    assert tandem("eval", str(tmp_path / "run")) == 0
    loss = summary(tmp_path / "run")["eval_after"]["loss"]
    assert f"{'loss':<20} {loss:.3f}" in capsys.readouterr().out


def test_a_reward_model_is_no_policy(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A critic may begin as one; a policy may not, and what it writes is not judged."""
    chosen, model = overrides("reward_model", recipe), tmp_path / "run/final"
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'run'}", "trainer.steps=2", *chosen) == 0
    assert load_value_model(model).score.weight.abs().min() > 0
    drawn = ["data.train={path: null, task: arithmetic, size: 8}", "data.heldout=null", "reward.function=exact_match"]
    short = ["sampling.max_tokens=4", "trainer.steps=1", f"run.dir={tmp_path / 'ppo'}"]
    assert tandem("train", str(recipe), "algorithm=ppo", f"critic.path={model}", *drawn, *short) == 0
    capsys.readouterr()
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'other'}", *chosen, "reward.function=exact_match") == 2
    assert "trains a model of values: leave reward out" in capsys.readouterr().err
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'other'}", f"model.path={model}", *overrides("dpo", recipe)) == 2
    assert "extra score.weight, the head of a value model" in capsys.readouterr().err
