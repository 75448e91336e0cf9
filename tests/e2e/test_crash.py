"""Law 10, end to end: a run that is killed anywhere and resumed ends as if nothing had happened.

Every crash point is hit twice: once early, where little or nothing is on disk, and once later, where there is something
to lose. What is compared is all of `runs.outcome`: weights bit for bit, each sample once, each metric once.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import tandem
from tests.e2e.runs import assert_same, forked, outcome, write_recipe

# Which passage of each point to die at: in the first and in the last part of the run.
POINTS = {
    "snapshot.begin": (1, 5),
    "snapshot.part.train": (1, 5),
    "train.in_save": (1, 5),
    "snapshot.part.queue": (1, 5),
    "queue.before_save": (1, 5),
    "queue.in_save": (1, 5),
    "queue.after_save": (1, 5),
    "snapshot.after_parts": (1, 5),
    "snapshot.manifest": (1, 5),
    "snapshot.before_rename": (1, 5),
    "snapshot.after_rename": (1, 5),
    "snapshot.retention": (1, 2),
    "log.metrics.before": (2, 11),
    "log.metrics.during": (2, 11),
    "log.metrics.after": (2, 11),
    "log.samples.before": (2, 20),
    "log.samples.during": (2, 20),
    "log.samples.after": (2, 20),
    "rollout.step": (3, 40),
    "rollout.before_put": (1, 6),
    "update.before_step": (3, 10),
    "update.after_step": (3, 10),
    "final.before_rename": (1,),
}
ELSEWHERE = {"log.journal.before", "log.journal.during", "log.journal.after"}
"""Passed only where a reward is killed: test_journal.py."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("undisturbed")
    arguments = ["train", str(write_recipe(directory)), f"run.dir={directory / 'run'}"]
    assert forked(arguments, directory / "log") == 0, (directory / "log").read_text()
    return outcome(directory / "run")


@pytest.mark.parametrize(("point", "passage"), [(point, passage) for point, at in POINTS.items() for passage in at])
def test_a_killed_run_ends_as_if_nothing_had_happened(
    point: str, passage: int, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    arguments = ["train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}"]
    log = tmp_path / "log"
    assert forked(arguments, log, crash_at=f"{point}:{passage}") == -9, (
        f"{point} was not passed {passage} times:\n{log.read_text()}"
    )
    assert forked([*arguments, "--resume"], log) == 0, log.read_text()
    assert_same(outcome(tmp_path / "run"), undisturbed)


def test_a_run_that_is_killed_again_and_again(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    arguments = ["train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}"]
    log = tmp_path / "log"
    for number, crash in enumerate(("update.before_step:2", "log.samples.during:3", "snapshot.before_rename:2", "rollout.step:30")):
        resume = ["--resume"] if number else []
        assert forked([*arguments, *resume], log, crash_at=crash) == -9, log.read_text()
    assert forked([*arguments, "--resume"], log) == 0, log.read_text()
    assert_same(outcome(tmp_path / "run"), undisturbed)


def test_what_has_a_state_of_its_own_goes_on_from_there(tmp_path: Path) -> None:
    """Greedy companions, shaped rewards, episodes drawn anew, a KL coefficient that follows the KL, a reference that is reset."""
    overrides = [
        "algorithm={name: remax, resampling: pow, kl_coef: 0.5, kl_target: 0.001, kl_horizon: 20}",
        "rollout.shaping={overlong_buffer_tokens: 4, stop_coef: 0.5}",
        "reference.reset_every=2",
        "learner.minibatches=1",
        "trainer.eval_every=0",
    ]
    runs = {crash: tmp_path / str(crash) for crash in (None, "update.before_step:9")}
    for crash, directory in runs.items():
        directory.mkdir()
        arguments = ["train", str(write_recipe(directory)), f"run.dir={directory / 'run'}", *overrides]
        log = directory / "log"
        assert forked(arguments, log, crash_at=crash) == (-9 if crash else 0), log.read_text()
        if crash:
            assert forked([*arguments, "--resume"], log) == 0, log.read_text()
    straight, resumed = (outcome(directory / "run") for directory in runs.values())
    assert_same(resumed, straight)
    steps = [line for line in straight["metrics"] if "train/kl_coef" in line]
    assert len({line["train/kl_coef"] for line in steps}) == 4
    assert [line["train/kl_coef_follows"] > 0 for line in steps] == [False, True, False, True]


ROLES = ["algorithm={name: ppo, kl_coef: 0.1}", "critic={train: {lr: 0.003}, warmup_steps: 1}", "learner.minibatches=1"]
"""Beside the policy: a reference that is a copy of it, and a critic that starts as one and is trained first."""


@pytest.fixture(scope="module")
def undisturbed_roles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("undisturbed_roles")
    arguments = ["train", str(write_recipe(directory)), f"run.dir={directory / 'run'}", *ROLES]
    assert forked(arguments, directory / "log") == 0, (directory / "log").read_text()
    return outcome(directory / "run")


@pytest.mark.parametrize(
    "crash", ["initial.before_rename:1", "snapshot.part.critic:1", "update.after_step:11", "snapshot.part.critic:3"]
)
def test_models_beside_the_policy_go_on_too(crash: str, undisturbed_roles: dict[str, Any], tmp_path: Path) -> None:
    arguments = ["train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}", *ROLES]
    log = tmp_path / "log"
    assert forked(arguments, log, crash_at=crash) == -9, log.read_text()
    assert forked([*arguments, "--resume"], log) == 0, log.read_text()
    assert_same(outcome(tmp_path / "run"), undisturbed_roles)


def test_a_finished_run_can_be_resumed(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    arguments = ["train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}"]
    for resume in ([], ["--resume"]):
        assert forked([*arguments, *resume], tmp_path / "log") == 0, (tmp_path / "log").read_text()
        assert_same(outcome(tmp_path / "run"), undisturbed)


def test_the_undisturbed_run_trains_on_each_sample_once(undisturbed: dict[str, Any]) -> None:
    assert all(line["train/grad_norm"] > 0 for line in undisturbed["metrics"] if "train/grad_norm" in line)
    keys = [sample["key"] for sample in undisturbed["samples"]]
    assert len(keys) == len(set(keys)) == 4 * 2 * 4


def test_every_crash_point_in_the_code_is_killed_at() -> None:
    """Points are written as literals, or as one f-string for a family."""
    found: set[str] = set()
    for path in Path(tandem.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "crash_point":
                (name,) = node.args
                if isinstance(name, ast.Constant):
                    found.add(str(name.value))
                else:
                    assert isinstance(name, ast.JoinedStr)
                    parts = [str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values]
                    found.add("".join(parts))
    known = set(POINTS) | ELSEWHERE
    unmatched = {point for point in found if not any(Path(name).match(point) for name in known)}
    assert not unmatched
