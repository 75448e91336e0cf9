"""Runs that train a model of transformers on a dataset, from a recipe to a directory that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.text.renderer import PLAIN_TEMPLATE
from tandem.text.tokenizer import character_tokenizer
from tests.e2e.runs import forked, read_lines, tandem

RECIPE = """
model: {path: MODEL, library: transformers}
data:
  train: {task: sorting, size: 256, demonstrations: {bad_frac: 0.0}}
  heldout: {task: sorting, size: 16, demonstrations: {bad_frac: 0.0}}
algorithm: sft
rollout: {groups_per_step: 16, group_size: 1}
engine: {max_context: 32}
train: {lr: 0.01}
trainer: {steps: 12, eval_every: 6, snapshot_every: 6}
evaluation: {tasks: 16}
logs: []
"""
DPO = ["algorithm={name: dpo, beta: 0.5}", "data.train.demonstrations=null", "data.heldout.demonstrations=null", "train.lr=1e-3"]


@pytest.fixture(scope="module", name="recipe")
def _recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a GPT-2 with random weights."""
    directory = tmp_path_factory.mktemp("library")
    tokenizer = character_tokenizer("".join(sorted(set("0123456789="))), template=PLAIN_TEMPLATE)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": tokenizer.vocab_size}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", bos_token_id=None, eos_token_id=0, **shape))
    model.save_pretrained(directory / "gpt2")
    tokenizer.save(directory / "gpt2")
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(directory / "gpt2")))
    return path


@pytest.fixture(scope="module", name="run")
def _run(recipe: Path) -> Path:
    assert tandem("train", str(recipe), f"run.dir={recipe.parent / 'run'}") == 0
    return recipe.parent / "run"


def summary(run: Path) -> dict[str, dict[str, float]]:
    return json.loads((run / "summary.json").read_text())


def test_it_learns_and_transformers_reads_what_it_leaves(run: Path) -> None:
    before, after = (summary(run)[f"eval_{when}"]["loss"] for when in ("before", "after"))
    assert after < 0.7 * before
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.transformer.wte.weight.shape[0] == model.config.vocab_size
    assert tandem("eval", str(run)) == 0


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_weights(recipe: Path, run: Path, tmp_path: Path) -> None:
    arguments = ["train", str(recipe), f"run.dir={tmp_path / 'run'}"]
    assert forked(arguments, tmp_path / "log", crash_at="update.after_step:9") == -9
    assert forked([*arguments, "--resume"], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    found, want = (load_file(directory / "final/model.safetensors") for directory in (tmp_path / "run", run))
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def test_preferences_begin_at_a_copy_of_the_policy_and_with_an_adapter_at_its_base(recipe: Path, tmp_path: Path) -> None:
    for name, overrides in (("copy", []), ("adapter", ["lora.rank=4", "lora.targets=[c_attn]", "train.lr=1e-2"])):
        directory = tmp_path / name
        assert tandem("train", str(recipe), f"run.dir={directory}", *DPO, *overrides) == 0
        before, after = (summary(directory)[f"eval_{when}"] for when in ("before", "after"))
        assert before["reward_margin"] == 0
        assert after["reward_margin"] > 0
        assert (directory / "initial").is_dir() == (name == "copy")
        assert (directory / "final/adapter").is_dir() == (name == "adapter")


@pytest.mark.slow
def test_it_trains_in_processes_of_its_own_as_here(recipe: Path, run: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        directory, log = tmp_path / str(ranks), tmp_path / "log"
        where = ("runtime.name=process", f"runtime.pools={{trainer: {ranks}}}")
        assert forked(["train", str(recipe), f"run.dir={directory}", *where], log) == 0, log.read_text()
        losses = [
            [line["train/loss"] for line in read_lines(each / "metrics.jsonl") if "train/loss" in line] for each in (directory, run)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.library=tandem"],
            "model_type 'gpt2' is not supported; llama, mistral, qwen2, qwen3, gemma, smollm3 are. With model.library=transformers",
        ),
        (["algorithm=grpo", "reward.function=exact_match"], "the native engine generates with tandem's own decoder"),
        (["reward.function=exact_match"], "the native engine generates with tandem's own decoder"),
        (["algorithm=reward_model", *DPO[1:]], "reward_model trains a model of values, which model.library=transformers has not"),
        (["engine.max_context=65"], "engine.max_context=65 is above the 64 positions of the model"),
        (["lora.targets=[q_proj]"], "'q_proj' matches no projection of the model; the nearest are c_proj"),
        (["model.path=null", "model.new={}"], "which library=transformers does not compute: give path"),
    ],
)
def test_what_such_a_model_cannot_do_is_said_before_the_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'run'}", *overrides) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
