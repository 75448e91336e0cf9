"""What a user gets wrong, and what the world does: one clear message, the right exit code, and nothing half-written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tandem.models.hf import load_value_model, save_decoder
from tests.e2e.runs import RECIPE, tandem, write_recipe

SHORT = ("trainer.steps=1", "warmup.steps=1", "warmup.snapshot_every=0")


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on stderr, which is one message and no traceback."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert text.count("error:") == 1
    return text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    directory = tmp_path_factory.mktemp("finished")
    assert tandem("train", str(write_recipe(directory)), f"run.dir={directory / 'run'}", "trainer.steps=2", "warmup=null") == 0
    return directory / "run"


def train(tmp_path: Path, *overrides: str, **files: str) -> int:
    return tandem("train", str(write_recipe(tmp_path, **files)), f"run.dir={tmp_path / 'run'}", *SHORT, *overrides)


MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown key": (("trainer.step=3",), ("trainer.step", "trainer.steps")),
    "wrong type": (("trainer.steps=many",), ("trainer.steps", "many")),
    "value out of range": (("sampling.temperature=-1",), ("temperature", "-1")),
    "unknown algorithm": (("algorithm=gpro",), ("gpro", "grpo")),
    "unknown algorithm parameter": (("algorithm.clip_hi=0.3",), ("clip_hi", "clip_high")),
    "a critic that nothing reads": (("critic.train.lr=1e-3",), ("critic", "grpo", "values")),
    "unknown task": (("data.train.task=calculater",), ("calculater", "calculator")),
    "unknown environment": (("agent.env=calc",), ("calc", "calculator")),
    "missing dataset": (("data.train.task=null", "data.train.path=no/such.jsonl"), ("no/such.jsonl",)),
    "missing model": (("model.new=null", "model.path=no/such/model"), ("no/such/model",)),
    "missing reward file": (("reward.function=no/such.py:f",), ("no/such.py",)),
    "missing reward function": (("reward.function=tandem.rewards.functions:nothing",), ("nothing",)),
    "no reward": (("reward=null",), ("reward.function", "reward.url", "reward_model.path")),
    "a reward by two judges": (("reward.url=http://localhost/score",), ("function", "url")),
    "no address of a judge": (("reward={function: null, url: 'localhost:80'}",), ("reward", "url='localhost:80'", "http://")),
    "a judge that is down": (
        ("reward={function: null, url: 'http://127.0.0.1:1/score'}",),
        ("reward url http://127.0.0.1:1/score cannot be reached", "start the judge"),
    ),
    "a try of a function": (("reward.try_limit_s=1.0",), ("try_limit_s=1.0", "url")),
    "a reward model that is not there": (
        ("reward_model.path=no/such",),
        ("reward_model.path=no/such", "recipes/reward_model.yaml"),
    ),
    "refusals where there are no pairs": (("data.train.refusal_frac=0.5",), ("refusal_frac=0.5", "pairs")),
    "context beyond the model's": (("engine.max_context=65",), ("65", "64")),
    "prompt longer than the context": (("engine.max_context=6", "warmup=null"), ("6", "max_context")),
    "demonstration longer than the context": (("engine.max_context=8",), ("tokens", "8")),
    "two sides in one process": (("trainer.mode=separate_async", "runtime=inline"), ("separate_async", "runtime=process")),
    "a GPU where there is none": (("run.device=cuda",), ("cuda", "cpu")),
    "more tasks than there are": (("data.heldout.size=1000000",), ("1000000",)),
    "missing template": (("model.template=no/such.jinja",), ("model.template", "no/such.jinja")),
    "groups that leave nothing to compare": (("rollout.group_size=1",), ("rollout.group_size=1", "grpo")),
    "parts of a reward that nobody names": (("algorithm=gdpo",), ("gdpo", "reward.components")),
    "a part that a reward lacks": (("algorithm=gdpo", "reward.components=[format]"), ("'format'", "reward.components")),
    "weights for other parts": (
        ("algorithm=gdpo", "algorithm.reward_weights=[1.0,2.0]", "reward.components=[right]"),
        ("reward_weights=[1.0, 2.0]", "right"),
    ),
    "shaping of rewards that nothing reads": (
        ("algorithm=gdpo", "reward.components=[right]", "rollout.shaping.stop_coef=0.5"),
        ("rollout.shaping", "gdpo"),
    ),
    "a reset before the beginning": (("algorithm.kl_coef=0.1", "reference.reset_every=-1"), ("reset_every", "-1")),
    "a buffer longer than an answer": (("rollout.shaping.overlong_buffer_tokens=9",), ("=9", "sampling.max_tokens=8")),
    "more mini-batches than groups": (("learner.minibatches=3",), ("learner.minibatches=3", "2 groups")),
    "a run that leaves its directory": (("run.dir=null", "run.name=.."), ("name='..'",)),
    "a model that nothing reads": (("process_model.warmup_steps=1",), ("process_model", "grpo", "prm_logprobs")),
    "a reference that nothing reads": (("reference.path=no/such",), ("reference", "grpo", "ref_logprobs")),
    "no teacher": (("algorithm=opd",), ("opd", "teacher.path")),
    "a teacher that is not there": (("algorithm=opd", "teacher.path=no/such"), ("no/such",)),
    "a policy that is never trained": (("algorithm=prime", "process_model.warmup_steps=1"), ("warmup_steps=1", "trainer.steps=1")),
    "a parameter in two places": (
        ("algorithm=prime", "process_model.implicit_beta=0.1"),
        ("process_model.implicit_beta", "algorithm.implicit_beta"),
    ),
    "the objective of a critic as a policy's": (("algorithm=value",), ("algorithm.name=value", "critic", "ppo or vapo")),
    "that of a process model": (("algorithm=implicit_prm",), ("algorithm.name=implicit_prm", "process_model", "prime")),
    "a parameter of an objective out of range": (("algorithm=ppo", "critic.huber_delta=0.0"), ("critic: ", "huber_delta", "0.0")),
    "no such parameter of an objective": (("algorithm=prime", "process_model.implicit_bet=0.1"), ("implicit_bet", "implicit_beta")),
    "heads that do not divide": (("model.new.num_heads=3", "model.new.num_kv_heads=2"), ("num_heads", "3")),
}


@pytest.mark.parametrize(("overrides", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_its_value(
    overrides: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, *overrides) == 2
    message = complaint(capsys)
    for word in words:
        assert word in message
    assert not (tmp_path / "run" / "final").exists()


def test_a_missing_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tandem("train", str(tmp_path / "none.yaml")) == 2
    assert "none.yaml" in complaint(capsys)


def test_an_empty_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert train(tmp_path, "data.train.task=null", f"data.train.path={empty}") == 2
    assert str(empty) in complaint(capsys)


def test_a_character_that_the_tokenizer_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "7 plus 2?", "answer": "9"}) + "\n")
    assert train(tmp_path, "data.train.task=null", f"data.train.path={data}", "warmup=null") == 2
    assert "'7 plus 2?'" in complaint(capsys)


REWARDS: dict[str, tuple[str, int, str]] = {
    "NaN": ("return [float('nan')] * len(group)", 1, "nan"),
    "None": ("return [None] * len(group)", 1, "None"),
    "an exception": ("raise KeyError('colour')", 1, "colour"),
    "the wrong count": ("return [1.0]", 2, "1"),
    "no list": ("return 1.0", 2, "1.0"),
    "text": ("return ['good'] * len(group)", 2, "good"),
}


@pytest.mark.parametrize(("body", "code", "word"), REWARDS.values(), ids=REWARDS.keys())
def test_a_reward_that_breaks_its_contract(
    body: str, code: int, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "warmup=null", "data.heldout=null", reward=f"def digits(task, group):\n    {body}\n") == code
    message = complaint(capsys)
    assert word in message
    assert not (tmp_path / "run" / "samples.jsonl").read_text()


def test_a_reward_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = "import time\ndef digits(task, group):\n    time.sleep(600)\n"
    assert train(tmp_path, "warmup=null", "data.heldout=null", "reward.limit_s=0.3", reward=hangs) == 1
    assert "0.3 s" in complaint(capsys)


def test_a_tokenizer_without_eos(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(finished / "final", tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert train(tmp_path, "model.new=null", f"model.path={model}") == 2
    assert "eos_token" in complaint(capsys)


def test_a_model_with_missing_and_extra_tensors(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(finished / "final", tmp_path / "model")
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["model.extra.weight"] = weights.pop("model.norm.weight")
    safetensors.torch.save_file(weights, model / "model.safetensors")
    assert train(tmp_path, "model.new=null", f"model.path={model}") == 2
    message = complaint(capsys)
    assert "model.norm.weight" in message
    assert "model.extra.weight" in message


def test_a_directory_that_holds_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    assert train(tmp_path) == 2
    assert "run.dir" in complaint(capsys)
    assert (tmp_path / "run" / "thesis.tex").read_text() == "precious"


def test_a_run_cannot_be_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("precious")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, file in (("notes", "notes"), ("notes/run", "notes"), ("nowhere", "nowhere")):
        assert train(tmp_path, f"run.dir={tmp_path / name}") == 2
        assert f"{tmp_path / file} is no directory" in complaint(capsys)


def test_an_earlier_run_in_the_working_directory_stays(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Put aside, it would still be the working directory, and the new run would write into it."""
    shutil.copytree(finished, tmp_path / "run")
    for inside, path in ((".", "."), ("final", ".."), ("snapshots", str(tmp_path / "run"))):
        monkeypatch.chdir(tmp_path / "run" / inside)
        assert train(tmp_path, f"run.dir={path}") == 2
        assert "working directory" in complaint(capsys)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_an_earlier_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert train(tmp_path, "warmup=null") == 0
    assert "is kept as" in capsys.readouterr().out
    assert (tmp_path / "run.1" / "summary.json").is_file()
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_run_that_is_done_says_so_and_keeps_the_values_that_it_had(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    arguments = ("train", str(write_recipe(tmp_path)), f"run.dir={run}", "trainer.steps=2", "warmup=null", "train.lr=0.5")
    assert tandem(*arguments, "--resume") == 0
    assert "all 2 steps are done: nothing is left to train" in capsys.readouterr().out
    assert (run / "config.yaml").read_text() == config
    assert tandem(*arguments, "trainer.steps=3", "--resume") == 0
    assert "lr: 0.5" in (run / "config.yaml").read_text()


def test_a_full_disk_while_a_snapshot_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        assert train(tmp_path, "warmup=null") == 1
    assert "free" in complaint(capsys)
    assert not list((tmp_path / "run" / "snapshots").iterdir())
    assert tandem("train", str(tmp_path / "tiny.yaml"), f"run.dir={tmp_path / 'run'}", *SHORT, "warmup=null", "--resume") == 0


def test_a_damaged_snapshot_is_passed_over(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    newest, older = sorted((run / "snapshots").iterdir(), reverse=True)
    weights = newest / "train" / "model" / "whole.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    arguments = ("train", str(write_recipe(tmp_path)), f"run.dir={run}", "trainer.steps=2", "warmup=null", "--resume")
    assert tandem(*arguments) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert newest.name in said
    assert older.name in said
    assert (
        json.loads((run / "summary.json").read_text())["weights"] == json.loads((finished / "summary.json").read_text())["weights"]
    )


def test_damaged_snapshots_and_nothing_else(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for snapshot in (run / "snapshots").iterdir():
        (snapshot / "manifest.json").write_text("{}")
    arguments = ("train", str(write_recipe(tmp_path)), f"run.dir={run}", "trainer.steps=3", "warmup=null", "--resume")
    assert tandem(*arguments) == 1
    assert "snapshots" in complaint(capsys)


def test_a_snapshot_of_another_model(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    recipe = write_recipe(tmp_path, recipe=RECIPE.replace("hidden_size: 32", "hidden_size: 48"))
    assert tandem("train", str(recipe), f"run.dir={run}", "trainer.steps=3", "warmup=null", "--resume") == 2
    assert "model.new.hidden_size=48 (it had 32)" in complaint(capsys)


def test_a_failed_start_leaves_the_run_before_it_alone(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for mistake in ("reward.function=calculatr", "algorithm=gpro", "data.train.size=1000000", "algorithm=opd"):
        assert train(tmp_path, "warmup=null", mistake) == 2
        complaint(capsys)
    assert (run / "summary.json").is_file()
    assert not (tmp_path / "run.1").exists()


def test_resuming_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "--resume") == 2
    assert "--resume" in complaint(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["seed=5", "model.new.hidden_size=48", "algorithm=gspo"])
def test_a_resumed_run_cannot_become_another(
    change: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    arguments = ("train", str(write_recipe(finished.parent)), f"run.dir={run}", "trainer.steps=3", "warmup=null", "--resume")
    assert tandem(*arguments, change) == 2
    assert change.split("=")[1] in complaint(capsys)
    assert (run / "config.yaml").read_text() == config
    assert tandem(*arguments) == 0
    assert "resuming with trainer.steps=3 where the run had 2" in capsys.readouterr().out


def test_two_runs_in_one_directory(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert train(tmp_path, "warmup=null") == 2
    os.close(descriptor)
    assert "in use" in complaint(capsys)
    assert (run / "summary.json").is_file()


def test_a_teacher_with_another_vocabulary(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last character has another id."""
    other = shutil.copytree(finished / "final", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=lambda token: vocabulary[token])
    vocabulary["~"] = vocabulary.pop(last)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert train(tmp_path, "algorithm=opd", f"teacher.path={other}", "warmup=null") == 2
    message = complaint(capsys)
    assert all(word in message for word in (str(other), "another vocabulary", "2 tokens differ", repr(last)))


def test_a_copy_of_the_policy_cannot_join_a_run_that_has_begun(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights with which the run began are gone; and what a refused start was asked for is not written down."""
    begun = shutil.copytree(finished, tmp_path / "begun")
    config = (begun / "config.yaml").read_text()
    assert (
        tandem("train", str(begun / "config.yaml"), f"run.dir={begun}", "trainer.steps=3", "algorithm.kl_coef=0.1", "--resume") == 2
    )
    assert "reference would be a copy of the policy as the run began" in complaint(capsys)
    assert (begun / "config.yaml").read_text() == config


def test_a_reward_model_that_cannot_be(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that scores nothing, one with other tokens than the policy's, and one where parts of a reward are credited."""
    model, scorer = finished / "final", tmp_path / "scorer"
    assert train(tmp_path, f"reward_model.path={model}") == 2
    assert f"reward_model.path={model} holds no reward model but one of language" in complaint(capsys)
    shutil.copytree(model, scorer)
    save_decoder(load_value_model(model), scorer)
    other = ("data.train.task=sorting", "data.heldout.task=sorting", "warmup=null", "agent={name: single_turn, env: null}")
    assert train(tmp_path, f"reward_model.path={scorer}", *other) == 2
    assert f"reward_model.path={scorer} has another vocabulary than the policy" in complaint(capsys)
    assert train(tmp_path, f"reward_model.path={scorer}", "algorithm=gdpo", "reward.components=[right]") == 2
    assert "reward_model is set, and gdpo with its parameters reads no rewards" in complaint(capsys)
