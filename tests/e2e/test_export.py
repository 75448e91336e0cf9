"""What `tandem export` makes of runs that are no policy's, and of snapshots that are damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import forked, tandem, write_recipe

PAIRS = """
model:
  new: {hidden_size: 32, intermediate_size: 48, num_layers: 1, num_heads: 2, num_kv_heads: 1, max_positions: 64}
data: {train: {task: calculator, size: 64}}
algorithm: reward_model
rollout: {groups_per_step: 4, group_size: 1}
engine: {max_context: 64}
trainer: {steps: 2}
logs: []
"""


@pytest.mark.parametrize("warm", [True, False], ids=["after a warm-up", "from the start"])
def test_a_reward_model_is_exported_as_the_one_that_the_run_left(warm: bool, tmp_path: Path) -> None:
    warmup = "warmup: {data: {task: calculator, size: 64, demonstrations: {bad_frac: 0.0}}, steps: 2, rows_per_step: 8}\n"
    (tmp_path / "pairs.yaml").write_text(PAIRS + warmup * warm)
    run, log = tmp_path / "run", tmp_path / "log"
    assert forked(["train", str(tmp_path / "pairs.yaml"), f"run.dir={run}"], log) == 0, log.read_text()
    assert tandem("export", str(run), str(tmp_path / "model")) == 0
    architectures = json.loads((tmp_path / "model" / "config.json").read_text())["architectures"]
    assert architectures == ["LlamaForSequenceClassification"]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "model" / name).read_bytes() == (run / "final" / name).read_bytes()


def test_a_damaged_snapshot_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert forked(["train", str(write_recipe(tmp_path)), f"run.dir={run}", "trainer.steps=2"], tmp_path / "log") == 0
    weights = run / "snapshots" / "step-00000002" / "train" / "model" / "whole.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert tandem("export", str(run), str(tmp_path / "model")) == 0
    said = capsys.readouterr()
    assert "step-00000001 is in" in said.out
    assert "warning: " in said.err
    assert "step-00000002" in said.err
    shutil.rmtree(tmp_path / "model")
    assert tandem("export", str(run), str(tmp_path / "model"), "--step", "2") == 1
    assert "step-00000002" in (error := " ".join(capsys.readouterr().err.split()))
    assert "no good snapshot is left" not in error
    assert not (tmp_path / "model").exists()
