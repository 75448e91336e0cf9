"""What `tandem train`, `eval` and `config` leave behind and say, on a tiny recipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import RECIPE, read_lines, tandem, write_recipe
from tests.track.test_metrics_page import undocumented

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run, `tiny.yaml` beside it."""
    directory = tmp_path_factory.mktemp("train")
    overrides = ("logs=[console, tensorboard]", "evaluation.samples=2", "evaluation.pass_at=[2]")
    assert tandem("train", str(write_recipe(directory)), f"run.dir={directory / 'run'}", *overrides) == 0
    return directory / "run"


def test_the_run_s_directory(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.yaml", "metrics.jsonl", "samples.jsonl", "journal.jsonl", "summary.json", "curve.png",
        "tensorboard", "snapshots", "final", "warmup", "trace.json",
    }  # fmt: skip
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.*"))


def test_summary(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for result in (summary["eval_before"], summary["eval_after"]):
        rates = {"pass@1", "pass@2", "greedy", "reward", "cut_off"}  # shares of digits are no passes
        assert result.keys() == rates | {"n", "failed", "max_tokens"}
        assert result["n"] == 4
        assert result["failed"] == 0
    assert summary["steps"] == 4
    assert summary["wall_s"] > 0
    assert 2**26 < summary["peak_memory_bytes"] < 2**35
    (held,) = summary["peak_memory_bytes_by_role"]["policy"]
    assert sum(summary["planned_memory_bytes"].values()) < held <= summary["peak_memory_bytes"]
    assert "training_limit" not in summary


def test_answers_may_be_longer_where_they_are_measured(tmp_path: Path) -> None:
    """Both limits are measured, before and after, with the same draws."""
    overrides = ("evaluation.max_tokens=24", "trainer.steps=1", f"run.dir={tmp_path / 'run'}")
    assert tandem("train", str(write_recipe(tmp_path)), *overrides) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for when in ("eval_before", "eval_after"):
        longer, shorter = summary[when], summary["training_limit"][when]
        assert longer.keys() - {"n"} == shorter.keys()
        assert longer["cut_off"] <= shorter["cut_off"]
        assert (longer["max_tokens"], shorter["max_tokens"]) == (24, 8)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert {"eval/greedy", "eval/training_limit/greedy", "eval/cut_off"} <= lines[0].keys()


def test_a_run_that_goes_on_with_another_limit_says_so(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = shutil.copytree(run, tmp_path / "run")
    overrides = (f"run.dir={again}", "trainer.steps=5", "evaluation.max_tokens=24", "--resume")
    assert tandem("train", str(run.parent / "tiny.yaml"), *overrides) == 0
    assert tandem("show", str(again), "--samples", "0") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("before and after do not compare: 8 tokens at most before, 24 after") == 2
    summary = json.loads((again / "summary.json").read_text())
    assert (summary["eval_before"]["max_tokens"], summary["eval_after"]["max_tokens"]) == (8, 24)


def test_a_snapshot_has_the_score_of_its_evaluation(run: Path) -> None:
    """What `keep_best` goes by."""
    evaluated = {line["step"]: line["eval/pass@1"] for line in read_lines(run / "metrics.jsonl") if "eval/pass@1" in line}
    manifests = [json.loads(path.read_text()) for path in (run / "snapshots").glob("*/manifest.json")]
    assert {manifest["step"]: manifest["score"] for manifest in manifests} == {3: None, 4: evaluated[4]}


def test_samples_are_what_was_trained_on(run: Path) -> None:
    samples = read_lines(run / "samples.jsonl")
    assert [sample["key"] for sample in samples] == [f"train:{g}.{m}.0" for g in range(8) for m in range(4)]
    assert {sample["step"] for sample in samples} == {1, 2, 3, 4}
    assert all({"text", "reward", "stop", "policy", "prompt"} <= sample.keys() for sample in samples)
    assert all(sample["policy"] == f"policy@0.{sample['step'] - 1}" for sample in samples)


def test_each_metric_is_on_its_page(run: Path) -> None:
    lines = [*read_lines(run / "metrics.jsonl"), *read_lines(run / "warmup/metrics.jsonl")]
    assert undocumented({name for line in lines for name in line} - {"step", "time"}) == set()


def test_every_step_is_on_policy(run: Path) -> None:
    """Law 5 in a whole run: the sampler's logprobs are the trainer's, so the first ratio of a step is exactly 1."""
    steps = [line for line in read_lines(run / "metrics.jsonl") if "mismatch/tokens" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert {(line["mismatch/tokens"], line["mismatch/max"], line["mismatch/ess"]) for line in steps} == {(0, 0, 1)}


@pytest.mark.parametrize("overrides", [["algorithm=reinforce"], ["algorithm.bypass=true"]], ids=["no old_logprobs", "bypass"])
def test_so_it_is_measured_where_the_policy_has_no_pass_before_its_update(tmp_path: Path, overrides: list[str]) -> None:
    """By the first update of a batch alone: the next one is of weights that have moved away from the sampler's."""
    assert tandem("train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}", "trainer.steps=2", *overrides) == 0
    steps = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if "train/loss" in line]
    assert [line["train/optimizer_steps"] for line in steps] == [2, 2]
    assert [(line["mismatch/tokens"], line["mismatch/max"], line["mismatch/ess"]) for line in steps] == [(0, 0, 1)] * 2


def test_config_yaml_is_a_recipe_of_the_same_run(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert tandem("train", str(run / "config.yaml"), f"run.dir={again}") == 0
    assert json.loads((again / "summary.json").read_text())["weights"] == json.loads((run / "summary.json").read_text())["weights"]


def test_final_is_a_hugging_face_directory(run: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "final")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "77*99="}], tokenize=False, add_generation_prompt=True)
    assert prompt == "77*99="
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    assert model(ids).logits.shape == (1, 6, len(tokenizer))


def test_eval_of_a_run_repeats_its_last_measurement(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tandem("eval", str(run)) == 0
    said = capsys.readouterr().out
    after = json.loads((run / "summary.json").read_text())["eval_after"]
    assert f"{'pass@1':<20} {after['pass@1']:.3f}" in said
    assert f"{'greedy':<20} {after['greedy']:.3f}" in said


def test_a_model_directory_goes_on(run: Path, tmp_path: Path) -> None:
    """What a run leaves can be the start of another one, with its tokenizer and template."""
    overrides = ("model.new=null", f"model.path={run / 'final'}", "warmup=null", "trainer.steps=1")
    assert tandem("train", str(run.parent / "tiny.yaml"), f"run.dir={tmp_path / 'next'}", *overrides) == 0
    summary = json.loads((tmp_path / "next" / "summary.json").read_text())
    assert summary["eval_before"]["greedy"] == json.loads((run / "summary.json").read_text())["eval_after"]["greedy"]


def test_dry_run_writes_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tandem("train", str(run.parent / "tiny.yaml"), f"run.dir={tmp_path / 'dry'}", "--dry-run") == 0
    said = capsys.readouterr().out
    for word in (
        "6 steps of sft",
        "4 steps of grpo",
        "old_logprobs",
        "KV cache",
        "exact",
        "place    rewards in processes of their own; all else here",
    ):
        assert word in said
    assert not (tmp_path / "dry").exists()


def test_dry_run_says_where_rewards_are_judged(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("reward={function: environment, workers: null}", "warmup=null", "--dry-run")
    assert tandem("train", str(run.parent / "tiny.yaml"), f"run.dir={tmp_path / 'dry'}", *overrides) == 0
    assert "rewards in processes of their own" not in capsys.readouterr().out


def test_config_says_where_each_value_comes_from(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tandem("config", str(run.parent / "tiny.yaml"), "train.lr=0.1") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["train.lr"].endswith("command line: train.lr=0.1")
    assert "tiny.yaml:" in lines["trainer.steps"]
    assert lines["train.weight_decay"].endswith("default")


def test_supervised_training_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "completion": f"{i + 1}"}) + "\n" for i in range(10, 40)))
    overrides = ("algorithm=sft", "warmup=null", "reward=null", "data.train.task=null", f"data.train.path={data}", "train.lr=0.02")
    recipe = str(write_recipe(tmp_path))
    assert tandem("train", recipe, f"run.dir={tmp_path / 'run'}", "trainer.steps=30", *overrides) == 0
    assert "held-out loss" in capsys.readouterr().out
    losses = [line["train/loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert tandem("eval", str(tmp_path / "run")) == 0
    assert f"{'loss':<20} {summary['eval_after']['loss']:.3f}" in capsys.readouterr().out
    alone = ("trainer.steps=1", "data.heldout=null", "model.new=null", f"model.path={tmp_path / 'run' / 'final'}")
    assert tandem("train", recipe, f"run.dir={tmp_path / 'other'}", *alone, *overrides) == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


def test_a_demonstration_is_not_shown_to_the_policy(tmp_path: Path) -> None:
    """Data with completions can be held out or trained on by reward: the policy sees the prompt alone."""
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "completion": f"{i + 1}", "answer": f"{i + 1}"}) + "\n" for i in range(10, 18))
    )
    overrides = ("agent={name: single_turn, env: null}", "trainer.steps=1", "data.heldout=null")
    overrides += ("data.train.task=null", f"data.train.path={data}")
    assert tandem("train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}", *overrides) == 0
    assert all(sample["prompt"].endswith("+1=") for sample in read_lines(tmp_path / "run" / "samples.jsonl"))


@pytest.mark.parametrize("task", ["arithmetic", "sorting", "countdown"])
def test_every_built_in_task_runs(task: str, tmp_path: Path) -> None:
    recipe = RECIPE.replace("calculator", task).replace(f"agent: {{name: env, env: {task}, max_turns: 2}}", "agent: single_turn")
    recipe = recipe.replace("function: REWARD", f"function: {task}")
    overrides = ("trainer.steps=1", "warmup.steps=1", "sampling.max_tokens=20")
    path = write_recipe(tmp_path, recipe=recipe)
    assert tandem("train", str(path), f"run.dir={tmp_path / 'run'}", *overrides) == 0


def test_dynamic_sampling_trains_on_groups_that_differ(tmp_path: Path) -> None:
    overrides = ("algorithm.keep=varied_rewards", "warmup=null", "data.heldout=null", "trainer.steps=2")
    assert tandem("train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}", *overrides) == 0
    groups: dict[str, set[float]] = {}
    for sample in read_lines(tmp_path / "run" / "samples.jsonl"):
        groups.setdefault(sample["key"].split(".")[0], set()).add(sample["reward"])
    assert all(len(rewards) > 1 for rewards in groups.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7])
def test_the_quickstart_learns(seed: int, tmp_path: Path) -> None:
    assert tandem("train", str(ROOT / "recipes" / "quickstart.yaml"), f"seed={seed}", f"run.dir={tmp_path / 'run'}") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for rate in ("pass@1", "greedy"):
        assert summary["eval_before"][rate] < 0.45
        assert summary["eval_after"][rate] >= 0.9
    shutil.rmtree(tmp_path / "run")


def test_a_cut_distribution_is_said_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("sampling.top_p=0.9", "warmup=null", "data.heldout=null", "trainer.steps=1")
    assert tandem("train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}", *overrides) == 0
    assert "off-policy" in capsys.readouterr().out
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[0]["rollout/cut_support"] == 1


@pytest.mark.parametrize(("solved", "mark", "warned"), [(2.0, "✗", True), (1e-9, "✓", False)])
def test_what_counts_as_passed_is_marked_and_a_bar_that_no_answer_reaches_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], solved: float, mark: str, warned: bool
) -> None:
    recipe = write_recipe(tmp_path, reward="def digits(task, group):\n    return [0.9] * len(group)\n")
    overrides = ["warmup.steps=1", "trainer.steps=1", f"evaluation.solved={solved}", f"run.dir={tmp_path / 'run'}"]
    assert tandem("train", str(recipe), *overrides) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("no held-out answer passed: the best reward was 0.9" in said) == warned
    assert said.count(f"{mark} ") >= 3
    assert ("✗" if mark == "✓" else "✓") not in said


def test_greedy_answers_that_pass_are_answers_that_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A task's greedy answer is judged by itself, its two samples together."""
    recipe = write_recipe(tmp_path, reward="def digits(task, group):\n    return [1.0 if len(group) == 1 else 0.9] * len(group)\n")
    overrides = ["warmup=null", "trainer.steps=1", "evaluation.samples=2", f"run.dir={tmp_path / 'run'}"]
    assert tandem("train", str(recipe), *overrides) == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["eval_after"]["greedy"] == 1
    assert "no held-out answer passed" not in capsys.readouterr().out
