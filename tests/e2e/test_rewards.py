"""Rewards that are no function of this machine, through whole runs: a judge over HTTP and a reward model."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import assert_same, forked, outcome, read_lines, tandem, write_recipe

ROOT = Path(__file__).parents[2]


class Judge(ThreadingHTTPServer):
    """Judges as the tiny recipe's function does. fickle: an episode of training that comes again gets another value.

    busy: so many calls with episodes are answered with 503 first. began_s: when each of them came.
    """

    daemon_threads = True

    def __init__(self, *, fickle: bool = False, busy: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fickle, self.busy = fickle, busy
        self.began_s: list[float] = []
        self.asked: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"

    @property
    def override(self) -> str:
        return f"reward={{function: null, url: '{self.url}'}}"


class _Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["episodes"]:
            self.server.began_s.append(time.monotonic())
        if refused := bool(body["episodes"]) and self.server.busy > 0:
            self.server.busy -= 1
        content = b"" if refused else json.dumps([self._value(episode) for episode in body["episodes"]]).encode()
        self.send_response(503 if refused else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _value(self, episode: dict[str, Any]) -> Any:
        text, again = episode["completion"], self.server.asked[episode["key"]]
        self.server.asked[episode["key"]] += 1
        if episode["key"] == "train:1.2.0" and not (again and self.server.fickle):
            return {"failed": "it has an off day"}
        drift = again / 7 if self.server.fickle and episode["key"].startswith("train:") else 0
        return sum(c.isdigit() for c in text) / max(len(text), 1) + drift

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Quiet."""


@contextmanager
def judging(*, fickle: bool = False, busy: int = 0) -> Generator[Judge]:
    with Judge(fickle=fickle, busy=busy) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_judge_over_http_gives_the_rewards_and_a_failure_leaves_its_group(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with judging() as judge:
        assert tandem("train", str(write_recipe(tmp_path)), f"run.dir={run}", judge.override) == 0
    samples = {line["key"]: line for line in read_lines(run / "samples.jsonl")}
    assert samples["train:1.2.0"]["reward"] is None
    assert samples["train:1.2.0"]["reason"].endswith("could not judge it: 'it has an off day'")
    assert all(line["reward"] is not None for key, line in samples.items() if key != "train:1.2.0")
    steps = read_lines(run / "metrics.jsonl")
    assert sum(line.get("rollout/dropped_reward_failed", 0) for line in steps) == 1
    assert len(read_lines(run / "journal.jsonl")) == len(samples)
    assert json.loads((run / "summary.json").read_text())["eval_after"]["failed"] == 0


@pytest.mark.parametrize("crash", ["log.journal.after:20", "rollout.before_put:5", "update.before_step:12"])
def test_what_a_judge_said_stays_said(crash: str, tmp_path: Path) -> None:
    """Asked again it would say something else: only the journal knows what it said."""
    results = []
    with judging(fickle=True) as judge:
        for name in ("undisturbed", "killed"):
            judge.asked.clear()
            directory = tmp_path / name
            directory.mkdir()
            arguments = ["train", str(write_recipe(directory)), f"run.dir={directory / 'run'}", judge.override]
            if name == "killed":
                assert forked(arguments, directory / "log", crash_at=crash) == -9, (directory / "log").read_text()
                arguments.append("--resume")
            assert forked(arguments, directory / "log") == 0, (directory / "log").read_text()
            results.append(outcome(directory / "run"))
    assert_same(results[1], results[0])


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a reward model for the tiny recipe."""
    directory = tmp_path_factory.mktemp("scorer")
    recipe = str(write_recipe(directory))
    overrides = ("algorithm=reward_model", "reward=null", "trainer.steps=3", "trainer.eval_every=0")
    assert tandem("train", recipe, f"run.dir={directory / 'run'}", *overrides) == 0
    return directory / "run/final"


FOUR = ("algorithm={name: ppo, reward_kl_coef: 0.01}", "critic.train.lr=0.003")


def test_a_reward_model_is_trained_on_and_the_function_measures(scorer: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert tandem("train", str(write_recipe(tmp_path)), f"run.dir={run}", f"reward_model.path={scorer}", *FOUR) == 0
    rewards = [line["reward"] for line in read_lines(run / "samples.jsonl")]
    assert len({*rewards}) > len(rewards) / 2  # scores, and not shares of digits
    assert any(reward < 0 for reward in rewards)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_after"]["n"] == 4
    assert not (run / "journal.jsonl").exists()


def test_without_a_function_nothing_is_measured(scorer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (f"run.dir={tmp_path / 'run'}", f"reward_model.path={scorer}", "reward=null", "trainer.steps=1", *FOUR)
    assert tandem("train", str(write_recipe(tmp_path)), *overrides) == 0
    assert "nothing was measured" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("crash", ["rollout.before_put:5", "update.before_step:12"])
def test_a_killed_run_with_a_reward_model_ends_as_if_nothing_had_happened(crash: str, scorer: Path, tmp_path: Path) -> None:
    results = []
    for name in ("undisturbed", "killed"):
        directory = tmp_path / name
        directory.mkdir()
        arguments = ["train", str(write_recipe(directory)), f"run.dir={directory / 'run'}", f"reward_model.path={scorer}", *FOUR]
        if name == "killed":
            assert forked(arguments, directory / "log", crash_at=crash) == -9, (directory / "log").read_text()
            arguments.append("--resume")
        assert forked(arguments, directory / "log") == 0, (directory / "log").read_text()
        results.append(outcome(directory / "run"))
    assert_same(results[1], results[0])


def test_models_in_processes_of_their_own_give_the_same_run(scorer: Path, tmp_path: Path) -> None:
    """There the reference scores groups as they complete, in passes that depend on timing, and the reward model likewise."""
    results: list[dict[str, Any]] = []
    for where in ("inline", "{name: process, pools: {trainer: 1, reference: 1}}"):
        directory = tmp_path / str(len(results))
        directory.mkdir()
        overrides = (f"run.dir={directory / 'run'}", f"reward_model.path={scorer}", f"runtime={where}", *FOUR)
        assert tandem("train", str(write_recipe(directory)), *overrides) == 0
        found = outcome(directory / "run")
        for line in found["metrics"]:
            line.pop("publish/bytes", None)  # in one process nothing moves
        results.append(found)
    assert_same(results[1], results[0])


def test_models_sharded_over_two_processes_score_the_same(scorer: Path, tmp_path: Path) -> None:
    """Critic, reference, reward model and policy share two ranks, whose calls come from stages and rewards at once."""
    first: list[list[Any]] = []
    for where in ("inline", "process"):
        directory = tmp_path / where
        directory.mkdir()
        overrides = (f"run.dir={directory / 'run'}", f"reward_model.path={scorer}", f"runtime={where}", "trainer.steps=2", *FOUR)
        assert tandem("train", str(write_recipe(directory)), "warmup=null", *overrides) == 0
        samples = read_lines(directory / "run/samples.jsonl")
        first.append([(line["key"], line["text"], line["reward"]) for line in samples if line["step"] == 1])
    assert first[0] == first[1]


@pytest.mark.slow
def test_ppo_with_four_models_as_its_recipe_says(tmp_path: Path) -> None:
    """Trained on what a reward model says, the policy is right more often: by what it is measured with, which is not the model."""
    assert tandem("train", str(ROOT / "recipes/reward_model.yaml"), f"run.dir={tmp_path / 'scorer'}", "logs=[]") == 0
    overrides = (f"reward_model.path={tmp_path / 'scorer/final'}", "logs=[]")
    assert tandem("train", str(ROOT / "recipes/ppo.yaml"), f"run.dir={tmp_path / 'run'}", *overrides) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["eval_after"]["pass@1"] - summary["eval_before"]["pass@1"] >= 0.2
    explained = [line["critic/explained_variance"] for line in read_lines(tmp_path / "run/metrics.jsonl") if "train/loss" in line]
    assert max(explained) > 0.5
