"""Law 10 in whole runs: N steps equal k steps, a new process's worth of objects, and N - k steps more, bit for bit.

tests/faults does the same with SIGKILL at every crash point; here the breakers are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.intake import Intake
from tests.e2e.runs import assert_same, outcome, tandem, write_recipe
from tests.laws.breaking import Breaker
from tests.train.rows import make_rows, tiny_decoder


def check_resumed_run_equals_straight_run() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        recipe = str(write_recipe(directory))
        straight, stopped = directory / "straight", directory / "stopped"
        assert tandem("train", recipe, f"run.dir={straight}") == 0
        assert tandem("train", recipe, f"run.dir={stopped}", "trainer.steps=2") == 0
        assert tandem("train", recipe, f"run.dir={stopped}", "--resume") == 0
        assert_same(outcome(stopped), outcome(straight))


def check_each_sample_is_trained_on_once() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        arguments = ("train", str(write_recipe(directory)), f"run.dir={directory / 'run'}")
        assert tandem(*arguments, "trainer.steps=2") == 0
        assert tandem(*arguments, "--resume") == 0
        keys = [json.loads(line)["key"] for line in (directory / "run" / "samples.jsonl").read_text().splitlines()]
        assert len(keys) == len(set(keys)) == 32


def check_a_snapshot_is_of_the_step_that_it_was_taken_at() -> None:
    """However late it is written."""

    def train(engine: TorchEngine, seed: int) -> None:
        engine.forward_backward(make_rows([4, 7, 3], seed), loss_ref(configure("sft")))
        engine.step()

    with tempfile.TemporaryDirectory() as name:
        engine, resumed = TorchEngine(tiny_decoder(), TrainConfig(lr=0.01)), TorchEngine(tiny_decoder(1), TrainConfig(lr=0.01))
        train(engine, 0)
        write = engine.snapshot()
        train(engine, 1)
        write(Path(name))
        resumed.load(Path(name))
        train(resumed, 1)
        pairs = zip(engine.weight_shards(), resumed.weight_shards(), strict=True)
        assert all(torch.equal(ours.tensor, theirs.tensor) for ours, theirs in pairs)


def test_a_snapshot_is_of_the_step_that_it_was_taken_at() -> None:
    check_a_snapshot_is_of_the_step_that_it_was_taken_at()


def test_resumed_run_equals_straight_run() -> None:
    check_resumed_run_equals_straight_run()


def test_each_sample_is_trained_on_once() -> None:
    check_each_sample_is_trained_on_once()


def _forgets_the_optimizer(self: TorchEngine, path: Path) -> None:
    moments = self._optimizer.state
    _load(self, path)
    self._optimizer.state = moments


def _begins_again(self: Intake, state: dict[str, object]) -> None:
    _restore(self, state)  # type: ignore[arg-type]
    self._next = 0


_load, _restore = TorchEngine.load, Intake.restore


def _without_a_copy(self: TorchEngine) -> Callable[[Path], None]:
    return partial(self._write, self._state())


BREAKERS = [
    Breaker(
        10,
        "a snapshot that goes on with the run",
        "tandem.train.torch_engine:TorchEngine.snapshot",
        _without_a_copy,
        check_a_snapshot_is_of_the_step_that_it_was_taken_at,
    ),
    Breaker(
        10,
        "optimizer-state-forgotten",
        "tandem.train.torch_engine:TorchEngine.load",
        _forgets_the_optimizer,
        check_resumed_run_equals_straight_run,
    ),
    Breaker(
        10, "data-position-forgotten", "tandem.trainer.intake:Intake.restore", _begins_again, check_each_sample_is_trained_on_once
    ),
]
