"""Whole runs of a tiny recipe: in this process, or in forked ones that may be killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tandem import faults
from tandem.cli import Invocation, run
from tests.forks import FORKS

RECIPE = """
model:
  new: {hidden_size: 32, intermediate_size: 48, num_layers: 1, num_heads: 2, num_kv_heads: 1, max_positions: 64}
data:
  train: {task: calculator, size: 64}
  heldout: {task: calculator, size: 4}
agent: {name: env, env: calculator, max_turns: 2}
reward: {function: REWARD, workers: 1}
warmup:
  data: {task: calculator, size: 256, demonstrations: {bad_frac: 0.0}}
  steps: 6
  rows_per_step: 8
  snapshot_every: 2
  train: {lr: 0.01}
sampling: {max_tokens: 8}
rollout: {groups_per_step: 2, group_size: 4}
engine: {slots: 8, max_context: 64}
learner: {minibatches: 2}
train: {lr: 0.003, schedule: linear, total_steps: 20}
trainer: {steps: 4, eval_every: 2, snapshot_every: 1}
evaluation: {tasks: 4}
snapshots: {keep_last: 2}
logs: []
"""
"""Calls are short, rewards are rare, and every part of a run is there: two phases, mini-batches, snapshots, evaluation."""


REWARD = """
def digits(task, group):
    return [sum(c.isdigit() for c in episode.completion) / max(len(episode.completion), 1) for episode in group]
"""
"""An untrained model gets some of it, so that every step has a gradient."""


def write_recipe(directory: Path, *, recipe: str = RECIPE, reward: str = REWARD) -> Path:
    """The path of the recipe in `directory`; the reward's function is called `digits`."""
    (directory / "reward.py").write_text(reward)
    path = directory / "tiny.yaml"
    path.write_text(recipe.replace("REWARD", f"'{directory / 'reward.py'}:digits'"))
    return path


def tandem(*arguments: str) -> int:
    """The command line in this process: its exit code."""
    return run(arguments, Invocation())


def forked(
    arguments: Sequence[str],
    log: Path,
    *,
    crash_at: str | None = None,
    limit_s: float = 240,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> int:
    """The same in a process of its own: its exit code, -9 where SIGKILL ended it. What it printed is in `log`.

    before: called there first; a module's function, or a partial one.
    """
    crash = {"TANDEM_CRASH_AT": crash_at} if crash_at is not None else dict[str, str]()
    process = started(arguments, log, {**(environment or {}), **crash}, before)
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{list(arguments)} did not end within {limit_s} s:\n{log.read_text()}")
    code = process.exitcode
    process.close()
    assert code is not None
    return code


def started(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str], before: Callable[[], None] | None = None
) -> ForkServerProcess:
    """The same while it goes on; a log that is a pipe is waited for until somebody reads it."""
    process = FORKS.Process(target=_child, args=(list(arguments), str(log), dict(environment), before))
    process.start()
    return process


def _child(arguments: list[str], log: str, environment: dict[str, str], before: Callable[[], None] | None) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    faults.arm()
    if before is not None:
        before()
    sys.exit(run(arguments, Invocation()))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(directory: Path) -> dict[str, Any]:
    """What two runs of one recipe must have in common, to the bit: weights, rates, every sample and every metric.

    Left out: how long things took, and which process incarnation a policy belonged to.
    """
    summary = json.loads((directory / "summary.json").read_text())
    text = (directory / "samples.jsonl").read_text().replace(str(directory.parent), "")  # reasons name the reward's file
    samples = [{**line, "policy": line["policy"].split(".")[-1]} for line in map(json.loads, text.splitlines())]
    return {
        "weights": summary["weights"],
        "files": [path.read_bytes() for path in sorted((directory / "final").iterdir())],
        "rates": (summary["eval_before"], summary["eval_after"]),
        "samples": samples,
        "metrics": [_timeless(line) for line in read_lines(directory / "metrics.jsonl")],
        "warmup": [_timeless(line) for line in read_lines(directory / "warmup" / "metrics.jsonl")],
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails with the first difference of two outcomes, in a line: a whole one is too long to read, and to compare word by word."""
    for name, wanted in expected.items():
        if found[name] == wanted:
            continue
        if isinstance(wanted, list):
            assert len(found[name]) == len(wanted), f"{len(found[name])} {name} where there should be {len(wanted)}"
            pairs = zip(found[name], wanted, strict=True)
            first = next((i, str(a)[:500], str(b)[:500]) for i, (a, b) in enumerate(pairs) if a != b)
            raise AssertionError(f"{name}, number {first[0]}:\n{first[1]}\nwhere there should be\n{first[2]}")
        raise AssertionError(f"{name}: {found[name]} where there should be {wanted}")


def _timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if "time" not in name and not name.startswith("publish/")}
