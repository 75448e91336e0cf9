"""Every policy algorithm through the real loop: held-out pass@1 rises by 0.15 or more.

One model is warmed up once; each algorithm then takes 16 steps from there, on its defaults. The teacher is such a run's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.algos.columns import reads
from tandem.algos.table import ALGORITHMS
from tests.e2e.runs import read_lines, tandem

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.yaml"
RECIPE = """
model: {path: MODEL}
data:
  train: {task: calculator, size: 8000}
  heldout: {task: calculator, size: 256}
agent: {name: env, env: calculator, max_turns: 2}
reward: {function: calculator}
sampling: {temperature: 1.0, max_tokens: 16}
rollout: {groups_per_step: 8, group_size: 8}
engine: {slots: 64, max_context: 64}
train: {lr: 5.0e-4, schedule: constant, micro_batch_tokens: 2048} # at 1e-3 one seed in four falls back, by the warm start
trainer: {steps: 16, eval_every: 100, snapshot_every: 100}
evaluation: {tasks: 64}
logs: []
"""
PARTS = """
from tandem.rewards.functions import exact_match
from tandem.types import RewardResult

def parts(task, group):
    right = exact_match(task, group)
    asked = [float(any(message.role == "tool" for message in episode.messages)) for episode in group]
    return [RewardResult(r, {"right": r, "asked": a}) for r, a in zip(right, asked, strict=True)]
"""
CRITIC = ["critic.train.lr=5.0e-3", "critic.warmup_steps=8", "trainer.steps=24"]
EXTRA = {
    "dr_grpo": ["algorithm.length_constant=16.0"],
    "gdpo": ["reward.function=DIRECTORY/parts.py:parts", "reward.components=[right,asked]"],
    "prime": ["process_model.train.lr=1.0e-3"],
    "ppo": CRITIC,
    "turn_ppo": CRITIC,
    "pf_ppo": CRITIC,
    "vapo": [*CRITIC, "algorithm.lam_policy=1.0"],  # its own is 0 below 20 tokens
}
POLICY = [name for name, row in ALGORITHMS.items() if row.advantage is not None or "rollout_logprobs" in row.needs]
TAUGHT = [name for name in POLICY if any(column.startswith("teacher_") for column in reads(ALGORITHMS[name]))]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Starts from a warmed-up model."""
    directory = tmp_path_factory.mktemp("algorithms")
    overrides = ("trainer.steps=1", "evaluation.tasks=16", "logs=[]")
    assert tandem("train", str(QUICKSTART), f"run.dir={directory / 'warm'}", *overrides) == 0
    (directory / "parts.py").write_text(PARTS)
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(directory / "warm/final")))
    return path


@pytest.fixture(scope="module")
def teacher(recipe: Path) -> Path:
    directory = recipe.parent / "teacher"
    assert tandem("train", str(recipe), f"run.dir={directory}", "trainer.steps=24") == 0
    return directory / "final"


@pytest.mark.parametrize("name", POLICY)
def test_it_learns(name: str, recipe: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    extra = [override.replace("DIRECTORY", str(recipe.parent)) for override in EXTRA.get(name, ())]
    if name in TAUGHT:
        extra.append(f"teacher.path={request.getfixturevalue('teacher')}")
    overrides = (f"run.dir={tmp_path / 'run'}", f"algorithm={name}", *extra)
    assert tandem("train", str(recipe), *overrides) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["eval_after"]["pass@1"] - summary["eval_before"]["pass@1"] >= 0.15


def test_a_teacher_needs_no_reward(recipe: Path, teacher: Path, tmp_path: Path) -> None:
    """The same weights as with a reward that is measured and not read, and no episode is judged."""
    weights: list[str] = []
    for reward in ("reward.function=calculator", "reward=null"):
        run = tmp_path / reward
        overrides = (f"run.dir={run}", "algorithm=opd_topk", "trainer.steps=2", f"teacher.path={teacher}", reward)
        assert tandem("train", str(recipe), *overrides) == 0
        weights.append(json.loads((run / "summary.json").read_text())["weights"])
        judged = ["reward/mean" in line for line in train_of(run)]
        assert judged == [reward != "reward=null"] * 2
    assert weights[0] == weights[1]


MORE = {
    **{
        name: (f"algorithm.correction={name}",)
        for name in ("token_tis", "icepop", "kpop", "seq_mask_tis", "m2po", "rejection_sampling")
    },
    "two corrections": ("algorithm.correction={icepop: {low: 0.5, high: 2.0}, off_policy_sequence_mask: {}}",),
    "resampling": ("algorithm.resampling=pow",),
    # A right answer takes 12 of the 16 tokens: the penalty begins there.
    "shaping": ("rollout.shaping.overlong_buffer_tokens=4", "rollout.shaping.stop_coef=0.0"),
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_it_learns_with_more(more: tuple[str, ...], recipe: Path, tmp_path: Path) -> None:
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'run'}", "algorithm=grpo", *more) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["eval_after"]["pass@1"] - summary["eval_before"]["pass@1"] >= 0.15


def train_of(directory: Path) -> list[dict[str, float]]:
    return [line for line in read_lines(directory / "metrics.jsonl") if "train/loss" in line]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=grpo", "algorithm.kl_coef=0.04"],
        ["algorithm=grpo", "algorithm.kl_coef=0.04", "algorithm.kl_target=0.01"],
        ["algorithm=reinforce_pp", "algorithm.kl_coef=0.04", "algorithm.reward_kl_coef=0.01"],
    ],
)
def test_the_reference_is_the_policy_as_it_began(overrides: list[str], recipe: Path, tmp_path: Path) -> None:
    """Law 5 over the whole run: the divergence from it is exactly 0 in the first step, and not later."""
    assert tandem("train", str(recipe), f"run.dir={tmp_path / 'run'}", "trainer.steps=3", *overrides) == 0
    kl = [line["train/kl_ref"] for line in train_of(tmp_path / "run")]
    assert kl[0] == 0
    assert min(kl[1:]) > 0
