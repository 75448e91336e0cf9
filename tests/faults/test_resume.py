"""What resuming must get right beside losing nothing: states of their own, and runs that are done."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.runs import assert_same, forked, outcome, write_recipe


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


def test_a_finished_run_can_be_resumed(tmp_path: Path) -> None:
    arguments = ["train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}"]
    assert forked(arguments, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    before = outcome(tmp_path / "run")
    assert forked([*arguments, "--resume"], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert_same(outcome(tmp_path / "run"), before)
