"""examples/mini.py is `tandem train` without what a run needs beside the algorithm: the same weights, bit for bit."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tandem.models.hf import load_decoder
from tests.e2e.runs import read_lines, tandem

PATH = Path(__file__).parents[2] / "examples/mini.py"
RECIPE = f"""
model:
  new: {{hidden_size: 32, intermediate_size: 48, num_layers: 1, num_heads: 2, num_kv_heads: 1, max_positions: 64}}
data:
  train: {{task: sorting, size: 512}}
reward: {{function: '{PATH}:digits', workers: 1}}
sampling: {{max_tokens: 12}}
rollout: {{groups_per_step: 8, group_size: 8}}
engine: {{slots: 64, max_context: 64}}
train: {{lr: 3e-3}}
trainer: {{steps: 3}}
logs: []
"""


@pytest.fixture(scope="module")
def mini() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mini", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short() -> None:
    assert len(PATH.read_text(encoding="utf-8").splitlines()) < 200


def test_its_weights_are_those_of_the_loop(mini: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert tandem("train", str(tmp_path / "recipe.yaml"), f"run.dir={tmp_path / 'run'}") == 0
    expected = load_decoder(tmp_path / "run/final", torch.float32).state_dict()
    capsys.readouterr()
    found = asyncio.run(mini.train(3)).state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []

    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    rewards = [line["reward/mean"] for line in read_lines(tmp_path / "run/metrics.jsonl") if "reward/mean" in line]
    assert [line[3] for line in printed] == [f"{reward:.4g}" for reward in rewards]
    assert [line[-1] for line in printed] == ["0"] * 3


def test_it_learns(mini: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(mini.train(20))
    rewards = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
