"""Law 10, end to end: every crash point kills a run once, in one role; the run goes on and loses and repeats nothing.

A run is killed at several points, one after the other, each ROLE/POINT:TIMES as the process passes it that started last. In
sync mode it must end as the undisturbed run does, to the bit; `make faults` kills every role at every point, at random. Workers
die in runs that end then, and in runs that go on by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import assert_same
from tests.faults.kills import Run
from tests.faults.points import without
from tests.faults.settings import SETTINGS

Undisturbed = Callable[[str], dict[str, Any]]


def here(*points: str) -> tuple[str, ...]:
    return tuple(f"controller/{point}" for point in points)


CHAINS: dict[str, tuple[str, tuple[str, ...]]] = {
    "the beginning": ("sync", here("file.config.yaml.before:1", "file.config.yaml.after:1", "queue.before_take:2")),
    "a snapshot in the warm-up": (
        "sync",
        here(
            "snapshot.begin:1",
            "snapshot.part.train:2",
            "snapshot.copied:1",
            "train.in_save:1",
            "snapshot.manifest:1",
            "snapshot.after_rename:1",
        ),
    ),
    "a snapshot": (
        "sync",
        here(
            *("snapshot.part.queue:4", "queue.before_save:1", "queue.in_save:1", "queue.after_save:1", "snapshot.after_parts:1"),
            *("snapshot.manifest:1", "snapshot.before_rename:2", "snapshot.after_rename:1", "commit.before:1", "commit.after:1"),
        ),
    ),
    "old snapshots": ("sync", here("snapshot.retention:1", "snapshot.retention:2")),
    "a resumed run": (
        "sync",
        here(
            *("update.before:11", "restore.before:1", "restore.models:1", "queue.before_restore:1"),
            *("queue.after_restore:1", "restore.after:1", "publish.send:2"),
        ),
    ),
    "the queue: places and rows": (
        "sync",
        here(
            *("rollout.before_put:5", "queue.before_reserve:1", "queue.after_reserve:2", "queue.before_put:2", "queue.in_put:3"),
            *("queue.after_put:1", "rollout.after_put:2", "queue.before_drop:1", "queue.after_drop:3"),
        ),
    ),
    "a durable queue": (
        "durable",
        here(
            *("queue.before_log:3", "queue.in_log:3", "queue.after_log:3", "rollout.after_put:2", "commit.before:1"),
            *("queue.in_log:2", "update.after_step:3", "queue.before_take:2", "commit.after:1"),
        ),
    ),
    "a durable queue that is filled ahead": (
        "durable_async",
        here("queue.before_log:6", "queue.after_log:4", "update.after_step:5", "commit.before:1", "queue.in_log:2"),
    ),
    "the queue: columns and leases": (
        "sync",
        here(
            *("queue.before_write:16", "queue.in_write:2", "queue.after_write:3", "queue.before_take:1", "queue.after_take:1"),
            *("queue.before_ack:1", "queue.after_ack:1"),
        ),
    ),
    "generation and judgement": (
        "sync",
        here(
            *("rollout.step:30", "episode.before:3", "episode.after:2", "reward.before:2", "reward.after:1"),
            *("log.journal.before:1", "log.journal.during:1", "log.journal.after:1"),
        ),
    ),
    "an update and what comes after it": (
        "sync",
        here(
            *("handover.to_trainer:3", "forward.before:1", "forward.after:1", "update.before:1", "update.before_step:2"),
            *("update.after_step:2", "publish.before_load:2", "publish.in_load:2", "publish.after_load:2", "handover.to_rollout:1"),
        ),
    ),
    "what is written down": (
        "sync",
        here(
            *("log.metrics.before:7", "log.metrics.during:1", "log.metrics.after:1"),
            *("log.samples.before:5", "log.samples.during:2", "log.samples.after:8"),
        ),
    ),
    "the end": (
        "sync",
        here("final.before_rename:1", "final.in_rename:1", "file.summary.json.before:1", "file.summary.json.after:1"),
    ),
    "models beside the policy": (
        "roles",
        here(
            *("initial.before_rename:1", "initial.in_rename:1", "snapshot.part.critic:1", "update.after_step:3"),
            "snapshot.part.critic:2",
        ),
    ),
    "groups that wait for their step": (
        "colocate_async",
        here("snapshot.part.queue:5", "queue.in_save:2", "rollout.before_put:3", "log.samples.during:2", "snapshot.after_rename:1"),
    ),
    "a trainer in another process": (
        "separate_async",
        (
            *("controller/order.before:12", "controller/order.sent:20", "controller/order.answered:20", "trainer-0/obey.before:20"),
            *(
                "trainer-0/queue.ask.get:3",
                "trainer-0/obey.after:9",
                "trainer-0/queue.answered.write:2",
                "forkserver/fork.before:1",
            ),
            "forkserver/fork.after:1",
        ),
    ),
    "a stage that runs ahead of its batch": ("ranks", here("queue.before_release:3", "queue.after_release:2")),
    "a judge": ("sync", ("reward/judge.ready:1", "reward/judge.before:4")),
    "a judge that has decided": ("sync", ("reward/judge.after:4",)),
    "a judge of the last evaluation": ("sync", ("controller/final.before_rename:1", "reward/judge.before:1")),
}
"""What is killed: the setting that runs, and where. The first kill leaves something to lose."""

TWO_RANKS = ("trainer-1/update.before_step:3", "trainer-0/update.after_step:5", "trainer-1/train.in_save:4")
BY_ITSELF = {
    "one rank after the other": ("ranks", ("trainer-1/update.before_step:3", "trainer-0/train.in_save:2")),
    "one engine after the other": ("engines", ("rollout-1-0/publish.in_load:2", "rollout-0-0/rollout.step:40")),
    "an actor": ("ray", ("trainer-1/forward.after:4",)),
    "a worker, and the fork server": ("separate_async", ("trainer-0/update.after_step:5", "forkserver/fork.after:3")),
}
"""Workers that die once each, in one process of the run."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What an exact setting comes to where nothing is killed; each runs once."""
    known: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = Run(SETTINGS[name], tmp_path_factory.mktemp(name)).finish()
        return known[name]

    return of


def killed_and_gone_on_with(name: str, kills: Sequence[str], directory: Path, undisturbed: Undisturbed) -> None:
    run = Run(SETTINGS[name], directory)
    for at in kills:
        run.kill(at)
    found = run.finish()
    if run.comparable:
        assert_same(found, undisturbed(name))


_AT_EVERY_CHANGE = "a snapshot"  # `make test-slow` has all of them


@pytest.mark.parametrize(
    "chain", [pytest.param(each, marks=() if each == _AT_EVERY_CHANGE else pytest.mark.slow) for each in CHAINS]
)
def test_a_killed_run_loses_nothing_and_repeats_nothing(chain: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    killed_and_gone_on_with(*CHAINS[chain], tmp_path, undisturbed)


@pytest.mark.slow
def test_two_ranks_of_which_one_is_killed_lose_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    killed_and_gone_on_with("ranks", TWO_RANKS, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths", [pytest.param(each, marks=pytest.mark.ray if setting == "ray" else ()) for each, (setting, _) in BY_ITSELF.items()]
)
def test_a_run_whose_workers_die_goes_on_by_itself(deaths: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    name, kills = BY_ITSELF[deaths]
    run = Run(SETTINGS[name], tmp_path)
    assert run.outlive(kills) == [*kills]
    found = run.finish()
    if run.comparable:
        assert_same(found, undisturbed(name))


@pytest.mark.slow
def test_a_run_whose_worker_dies_again_and_again_ends_with_what_killed_it(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Each process that gets so far; the run that is gone on with, where none dies, loses nothing."""
    run = Run(SETTINGS["ranks"], tmp_path)
    run.kill("trainer-1/update.before_step:1", by_itself="warmup came no further since restart 1")
    assert_same(run.finish(), undisturbed("ranks"))


def test_every_crash_point_in_the_code_is_killed_at() -> None:
    killed = {kill.partition("/")[2].partition(":")[0] for _, kills in CHAINS.values() for kill in kills}
    assert not without(killed)
