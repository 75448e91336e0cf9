"""Runs that train an adapter: from a recipe to files that PEFT reads, through a crash, and in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.runs import assert_same, forked, read_lines, tandem, write_recipe

RECIPES = Path(__file__).parents[2] / "recipes"

LORA = ["lora.rank=3", "lora.alpha=6", "algorithm.kl_coef=0.1", "warmup=null", "model.new=null"]


@pytest.fixture(scope="module", name="base")
def _base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was warmed up a little, and the recipe that it came from."""
    directory = tmp_path_factory.mktemp("base")
    path = write_recipe(directory)
    assert tandem("train", str(path), f"run.dir={directory / 'run'}", "trainer.steps=1") == 0
    return directory


def arguments(base: Path, directory: Path, *overrides: str) -> list[str]:
    return ["train", str(base / "tiny.yaml"), f"run.dir={directory}", f"model.path={base / 'run/final'}", *LORA, *overrides]


@pytest.fixture(scope="module", name="whole")
def _whole(base: Path) -> Path:
    """A run that nothing disturbed."""
    directory = base / "whole"
    assert tandem(*arguments(base, directory)) == 0
    return directory


def same(found: Path, expected: Path) -> None:
    assert_same(*(_outcome(directory) for directory in (found, expected)))


def _outcome(directory: Path) -> dict[str, object]:
    adapter = load_file(directory / "final/adapter/adapter_model.safetensors")
    tensors = {name: tensor.tolist() for name, tensor in {**adapter, **load_file(directory / "final/model.safetensors")}.items()}
    summary = json.loads((directory / "summary.json").read_text())
    metrics = [
        {name: value for name, value in line.items() if name.startswith(("train/", "reward/", "mismatch/"))}
        for line in read_lines(directory / "metrics.jsonl")
    ]
    return {"tensors": tensors, "rates": (summary["eval_before"], summary["eval_after"]), "metrics": metrics}


def test_the_policy_begins_as_the_reference_and_is_exact(whole: Path) -> None:
    lines = [line for line in read_lines(whole / "metrics.jsonl") if "train/kl_ref" in line]
    assert len(lines) == 4
    assert lines[0]["train/kl_ref"] >= 0  # of two optimiser steps, the first of which begins at 0
    assert lines[-1]["train/kl_ref"] > 0
    assert all(line["mismatch/max"] == 0 for line in lines)
    assert all(line["publish/changed"] == 1 for line in lines)


def test_at_the_first_update_the_kl_to_the_base_is_exactly_0(base: Path, tmp_path: Path) -> None:
    assert tandem(*arguments(base, tmp_path / "run", "trainer.steps=1", "learner.minibatches=1")) == 0
    (line,) = (line for line in read_lines(tmp_path / "run/metrics.jsonl") if "train/kl_ref" in line)
    assert line["train/kl_ref"] == 0
    assert line["train/grad_norm"] > 0


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of transformers, to peft
def test_the_final_model_is_the_base_with_the_adapter_that_peft_reads(base: Path, whole: Path) -> None:
    tokens = torch.randint(10, (2, 12), generator=torch.Generator().manual_seed(0))
    frozen = AutoModelForCausalLM.from_pretrained(base / "run/final")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(whole / "final")(tokens).logits
        before = frozen(tokens).logits
        adapted = PeftModel.from_pretrained(frozen, whole / "final/adapter")(tokens).logits
    assert (merged - before).abs().max() > 1e-3
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
    config = json.loads((whole / "final/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((base / "run/final").resolve())


@pytest.mark.slow
@pytest.mark.parametrize("point", ["update.after_step:3", "snapshot.before_rename:2"])
def test_a_run_that_was_killed_goes_on_to_the_same_adapter(base: Path, whole: Path, tmp_path: Path, point: str) -> None:
    run = arguments(base, tmp_path / "run")
    assert forked(run, tmp_path / "log", crash_at=point) == -9
    assert forked([*run, "--resume"], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    same(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_policy_in_a_process_of_its_own_trains_the_same_adapter(base: Path, whole: Path, tmp_path: Path) -> None:
    overrides = ("runtime.name=process", "runtime.pools={trainer: 1}")
    assert forked(arguments(base, tmp_path / "run", *overrides), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    same(tmp_path / "run", whole)


def test_an_adapter_goes_on_only_beside_its_own_model(
    base: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "base"
    recipe = write_recipe(tmp_path)
    assert tandem("train", str(recipe), f"run.dir={other}", "trainer.steps=1", "seed=1") == 0
    run = [str(each).replace(str(base / "run/final"), str(tmp_path / "model")) for each in arguments(base, tmp_path / "run")]
    (tmp_path / "model").symlink_to(base / "run/final")
    assert tandem(*run, "trainer.steps=2") == 0
    (tmp_path / "model").unlink()
    (tmp_path / "model").symlink_to(other / "final")
    assert tandem(*run, "--resume") == 2
    assert "is the state of an adapter of another model" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_recipe_learns(tmp_path: Path) -> None:
    base = ("trainer.steps=1", "evaluation.tasks=16", "logs=[]")
    assert tandem("train", str(RECIPES / "quickstart.yaml"), f"run.dir={tmp_path / 'base'}", *base) == 0
    shorter = ("trainer.steps=16", "rollout.groups_per_step=8", "rollout.group_size=8", "logs=[]")
    recipe, model = RECIPES / "lora.yaml", tmp_path / "base/final"
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'run'}", f"model.path={model}", *shorter) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["eval_after"]["pass@1"] >= summary["eval_before"]["pass@1"] + 0.2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.targets=[q_prj]"], "lora.targets: 'q_prj' matches no projection of the model; the nearest are q_proj"),
        (["lora.rank=0"], "rank must be from 1 to 4096, got 0"),
        (["lora.dropout=0.1"], "lora.dropout"),
        (["reference.reset_every=2"], "with lora the reference is the frozen model"),
    ],
)
def test_what_an_adapter_cannot_be_is_said_before_the_run(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert tandem(*arguments(base, tmp_path / "run", *overrides)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_what_it_cannot_be_beside_is_said_before_the_run(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, model = str(write_recipe(tmp_path)), f"model.path={base / 'run/final'}"
    for overrides, message in (
        (["warmup=null"], "the weights of model.new are random: give model.path"),
        (["model.new=null", model], "warm up in a run of its own"),
        (
            ["model.new=null", model, "warmup=null", "algorithm=reward_model", "reward=null", "data.train.demonstrations={}"],
            "lora adapts a policy, and reward_model trains a model of values",
        ),
    ):
        assert tandem("train", recipe, f"run.dir={tmp_path / 'run'}", "lora.rank=4", *overrides) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_snapshot_is_exported_as_the_final_model_is(whole: Path, tmp_path: Path) -> None:
    assert tandem("export", str(whole), str(tmp_path / "model")) == 0
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        found, want = (load_file(directory / file) for directory in (tmp_path / "model", whole / "final"))
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
