"""Ways to run the tiny recipe of tests/e2e/runs.py, and the account that each must give of itself when it is done.

The reward fails group 3 always and takes its worker with it at group 5, so that groups are dropped and replaced in every run.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.runs import REWARD, read_lines, write_recipe

STEPS, GROUPS, SIZE = 4, 2, 4
LOST = (3, 5)

FALLIBLE = (
    REWARD.replace("def digits", "def _digits")
    + """
import os
def digits(task, group):
    key = group[0].key
    if key.space == "train" and key.ordinal == 3:
        raise ValueError("this one cannot be judged")
    if key.space == "train" and key.ordinal == 5:
        os._exit(1)
    return _digits(task, group)
"""
)
SLOW = FALLIBLE.replace("    key =", "    import time; time.sleep(0.05)\n    key =")
"""One group at a time is judged, so that others wait for it while a step is trained and a snapshot made."""


@dataclass(frozen=True)
class Setting:
    """arguments: beside the tiny recipe's. exact: whether all its runs have the same bits. staleness: the oldest sample allowed."""

    name: str
    arguments: tuple[str, ...]
    exact: bool = True
    staleness: int = 0
    reward: str = FALLIBLE
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def command(self, directory: Path) -> list[str]:
        recipe = write_recipe(directory, reward=self.reward)
        return ["train", str(recipe), f"run.dir={directory / 'run'}", "reward.limit_s=30", *self.arguments]


_PPO = ("algorithm=ppo", "algorithm.reward_kl_coef=0.1", "critic.train.lr=0.003", "critic.warmup_steps=1", "learner.minibatches=1")
_TIS = "algorithm.correction=token_tis"

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("sync", ()),
        Setting("durable", ("queue=durable", "trainer.snapshot_every=2")),
        Setting("roles", _PPO),
        Setting("ranks", (*_PPO, "runtime=process", "runtime.pools={trainer: 2}")),
        Setting("engines", ("rollout.engines=2", "runtime=process", "runtime.pools={trainer: 1}")),
        Setting("ray", (*_PPO, "runtime=ray"), environment={"RAY_ADDRESS": "local", "RAY_TMPDIR": tempfile.gettempdir()}),
        Setting("colocate_async", ("trainer.mode=colocate_async", _TIS), exact=False, staleness=1, reward=SLOW),
        Setting(
            "separate_async",
            ("trainer.mode=separate_async", "trainer.staleness=2", _TIS, "runtime=process", "runtime.pools={trainer: 1}"),
            exact=False,
            staleness=2,
            reward=SLOW,
        ),
        Setting(
            "durable_async",
            ("queue=durable", "trainer.snapshot_every=3", "trainer.mode=colocate_async", "trainer.staleness=2", _TIS),
            exact=False,
            staleness=2,
            reward=SLOW,
        ),
    )
}


def account(run: Path, setting: Setting) -> None:
    """Law 10 and the bound of staleness, from what a finished run has written; fails with what does not add up."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if "time/step_s" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "each step is logged once and in order"
    settled = read_lines(run / "samples.jsonl")
    twice = [key for key, times in Counter(line["key"] for line in settled).items() if times > 1]
    assert not twice, f"trained on or dropped twice: {twice}"
    samples = [line for line in settled if not line.get("dropped")]

    by_group: dict[int, list[dict[str, Any]]] = {}
    for line in samples:
        by_group.setdefault(int(line["key"].removeprefix("train:").split(".")[0]), []).append(line)
    assert all(len(members) == SIZE for members in by_group.values()), "a group is trained on whole"
    assert list(by_group) == sorted(by_group), "groups are trained on in the order of their admission"
    steps = [members[0]["step"] for members in by_group.values()]
    assert steps == [1 + index // GROUPS for index in range(STEPS * GROUPS)], "each step has its groups, and no other"
    dropped = Counter(int(line["key"].removeprefix("train:").split(".")[0]) for line in settled if line.get("dropped"))
    assert set(range(max(by_group))) <= {*by_group, *dropped}, "a group that was admitted is trained on, or dropped with a reason"
    assert set(LOST) == set(dropped), f"dropped: {sorted(dropped)}"
    assert {line.get("dropped") for line in settled} == {None, "reward_failed"}
    counted = sum(line.get("rollout/dropped_reward_failed", 0) for line in lines)
    assert counted == dropped.total(), f"{dropped.total()} samples were dropped, and {counted} are counted"

    ages = Counter[tuple[int, int]]()  # (step, versions between the policy that sampled and the one that was trained)
    for line in samples:
        ages[line["step"], line["step"] - 1 - version(line["policy"])] += 1
    assert all(0 <= age <= setting.staleness for _, age in ages), f"older than {setting.staleness} versions: {sorted(ages)}"
    for line in lines:
        by_age = {age: line[f"staleness/rows_of_age_{age}"] for age in range(setting.staleness + 1)}
        assert by_age == {age: ages[line["step"], age] for age in by_age}, f"step {line['step']}"
        assert "reward/mean" in line
        assert line.get("train/grad_norm", 1) > 0, "there is something to lose"
        if "train/loss" in line:  # and not while a critic warms up alone
            assert by_age[0] < GROUPS * SIZE or line["mismatch/max"] == 0, "fresh samples have the trainer's logprobs, bit for bit"
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
    left = [path for path in run.rglob("*") if "partial" in path.name or path.name.endswith(".draft") or "-meets" in path.name]
    assert not left, f"left behind: {left}"


def version(policy: str) -> int:
    """Of a policy as samples.jsonl names the oldest one that sampled."""
    return int(policy.rpartition(".")[2])
