"""Whole schedules on a virtual clock, with a source, a queue and a gate that are real and generation that is made up.

Episodes take any time, are cut or fail; rewards take any time and fail; training takes any time, and a process may die after any
step. Whatever comes of it: nothing is older than the schedule says, slots are conserved, groups are trained on once, and every
step is made.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data.fake import FakeDataset
from tandem.ports import LLM
from tandem.trainer.schedule import Placement, Schedule, schedule
from tandem.trainer.source import RolloutConfig
from tandem.types import BatchRef, Episode, Key, PolicyRef, RewardResult, Sample, Task
from tests.trainer.world import TableRollout, World, world

T = TypeVar("T")
DATASET = FakeDataset()


class _Selector(selectors.SelectSelector):
    """Waits for nothing: it moves the clock on by what a wait would last."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits and nothing will happen"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


def virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Pausable(TableRollout):
    """Generation that stands still between `pause` and `resume`."""

    def __init__(self) -> None:
        super().__init__()
        self.running = asyncio.Event()
        self.running.set()

    async def pause(self) -> None:
        self.running.clear()

    async def resume(self) -> None:
        self.running.set()


@dataclass(frozen=True)
class Plan:
    """One schedule, and what happens to it. seed: of all failures, and with `hurry` of all times. dies: the steps after which the
    process does.
    """

    timing: Schedule
    config: RolloutConfig
    seed: int
    failing: float
    steps: int = 4
    dies: frozenset[int] = frozenset()
    hurry: int = 0

    def random(self, *names: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *names])

    def seconds(self, *names: int) -> float:
        """Mostly short, at times very long."""
        return float(self.random(self.hurry, *names).choice([0.0, 0.01, 1.0, 2.0, 5.0, 60.0], p=[0.2, 0.2, 0.2, 0.2, 0.1, 0.1]))


plans = st.builds(
    lambda mode, k, window, too_old, n, size, spare, seed, failing, dies: Plan(
        schedule("sync") if mode == "sync" else schedule(mode, k, window, too_old if window else None),
        RolloutConfig(
            groups_per_step=n,
            group_size=size,
            max_refills_per_step=10_000,
            spare_groups=spare if mode == "sync" else 0,
            enough_episodes=2 if size > 2 and seed % 2 else 0,
        ),
        seed,
        failing,
        dies=frozenset(dies),
    ),
    st.sampled_from(["sync", "colocate_async", "separate_async"]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["mask", "drop", "correct"]),
    st.integers(1, 3),
    st.integers(2, 3),
    st.integers(0, 2),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3]),
    st.sets(st.integers(1, 3), max_size=1),
)


@dataclass
class Outcome:
    batches: list[dict[Key, tuple[list[int], list[tuple[int, int]]]]] = field(default_factory=list)
    """Of each step, each row's tokens and the versions that sampled them."""
    metrics: Counter[str] = field(default_factory=Counter[str])


def made(plan: Plan) -> World:
    rollout = Pausable()

    async def agent(task: Task, llm: LLM, key: Key) -> Episode:
        """Two parts, each of the policy of its moment."""
        runs, tokens = list[tuple[PolicyRef, int]](), [0]
        for part in range(2):
            await asyncio.sleep(plan.seconds(0, *key[1:3], part))
            await rollout.running.wait()
            runs.append((rollout.policy, 2))
            tokens += [key.ordinal, rollout.policy.version]
        if runs[0][0] == runs[1][0]:
            runs = [(runs[0][0], 4)]
        sample = Sample(key, np.array(tokens), np.array([False] + [True] * 4), np.zeros(5), tuple(runs), "stop")
        stop = "error" if plan.random(1, *key[1:3]).random() < plan.failing and key.member else "stop"
        return Episode(key, task, (replace(sample, stop=stop),), task.messages, stop)

    built = world(config=plan.config, dataset=DATASET, agent=agent, timing=plan.timing, rollout=rollout, stall_limit_s=1000.0)
    judge = built.reward

    async def slow(task: Task, group: list[Episode]) -> list[RewardResult]:
        ordinal = group[0].key.ordinal
        await asyncio.sleep(plan.seconds(2, ordinal))
        failed = plan.random(3, ordinal).random() < plan.failing
        return [
            RewardResult.failed("timeout") if failed and episode is not group[0] else RewardResult(float(episode.key.member))
            for episode in group
        ]

    judge.__class__ = type("Slow", (type(judge),), {"__call__": lambda self, task, group: slow(task, group)})
    return built


async def run(plan: Plan, check: Callable[[Plan, World, BatchRef, PolicyRef], Any]) -> Outcome:
    outcome, built, policy = Outcome(), made(plan), PolicyRef()
    with tempfile.TemporaryDirectory() as directory:
        while policy.version < plan.steps:
            async with aclosing(aiter(built.source)) as batches:
                async for batch in batches:
                    outcome.batches.append(await check(plan, built, batch, policy))
                    async with built.source.training():
                        await asyncio.sleep(plan.seconds(4, policy.version))
                        policy = policy.next()
                        built.rollout.policy = policy
                    metrics = await built.source.advance(policy)
                    assert plan.timing.staleness or not built.source._running, "between steps of sync nothing is under way"
                    outcome.metrics += Counter({name: int(metric.value) for name, metric in metrics.items() if name[:4] != "time"})
                    if policy.version in plan.dies or policy.version == plan.steps:
                        break
            if policy.version < plan.steps:
                await built.queue.save(Path(directory) / str(policy.version))
                state = json.loads(json.dumps(built.source.state()))
                built = made(plan)
                await built.queue.restore("s", Path(directory) / str(policy.version))
                built.source.restore(state)
                policy = built.rollout.policy = built.source.policy
    return outcome


async def check_batch(
    plan: Plan, built: World, batch: BatchRef, policy: PolicyRef
) -> dict[Key, tuple[list[int], list[tuple[int, int]]]]:
    """What holds of every batch; its rows."""
    timing, config = plan.timing, plan.config
    assert len(batch.groups) == config.groups_per_step
    rows = await built.queue.get(batch.keys, frozenset({"tokens", "mask", "policy"}))
    found: dict[Key, tuple[list[int], list[tuple[int, int]]]] = {}
    for key, part, runs in zip(rows.keys, rows.split([1] * len(rows)), rows.objects("policy"), strict=True):
        versions = [ref.version for ref, count in cast("list[tuple[PolicyRef, int]]", runs) for _ in range(count)]
        trained = [version for version, kept in zip(versions, part["mask"][1:].tolist(), strict=True) if kept]
        if timing.too_old != "correct":
            assert all(0 <= policy.version - version <= timing.staleness for version in trained)
        if timing.too_old != "mask":
            assert len(trained) == len(versions)
        elif policy.version - min(versions) <= timing.staleness:
            assert len(trained) == len(versions), "what is young enough is not masked"
        else:
            assert len(trained) == sum(policy.version - version <= timing.staleness for version in versions)
        found[key] = (part["tokens"].tolist(), [(ref.version, count) for ref, count in runs])
    gate = built.source._intake._gate
    under_way = {*built.source._running, *built.source._waiting}
    consumed = policy.version * config.groups_per_step
    assert gate._admitted - gate._returned == consumed + len(under_way), "every slot is a group's, or was given back"
    assert len(under_way) <= timing.in_flight(config.groups_per_step) + config.spare_groups
    if not timing.staleness:
        assert under_way == set(batch.groups), "nothing is begun that the next step would find old"
        assert not built.source._sampled
    return found


def holds(plan: Plan) -> None:
    outcome = virtually(run(plan, check_batch))
    assert len(outcome.batches) == plan.steps
    rows = [key for batch in outcome.batches for key in batch]
    assert len(rows) == len(set(rows)), "no group is trained on twice"
    if not plan.timing.window and not plan.config.spare_groups:
        assert rows == sorted(rows)
    tokens = sum(count for batch in outcome.batches for _, runs in batch.values() for _, count in runs)
    counted = [count for name, count in outcome.metrics.items() if name.startswith("staleness/tokens_of_age_")]
    assert sum(counted) == tokens


@given(plans)
@settings(max_examples=250, deadline=None)
def test_every_step_is_made_within_the_bound_whatever_happens(plan: Plan) -> None:
    holds(plan)


@pytest.mark.slow
@given(plans)
@settings(max_examples=800, deadline=None)
def test_the_same_of_thousands_of_schedules(plan: Plan) -> None:
    holds(plan)


@given(plans, st.integers(0, 2**32), st.sampled_from(["colocated", "separate"]))
@settings(max_examples=40, deadline=None)
def test_an_asynchronous_schedule_without_staleness_is_sync(plan: Plan, other: int, placement: Placement) -> None:
    """The same groups, tokens and policies, whatever the timing; failures are the same, since they are the seed's."""
    timing = schedule("sync")
    plan = replace(plan, timing=timing, config=replace(plan.config, spare_groups=0, enough_episodes=0))
    loose = Schedule("colocate_async" if placement == "colocated" else "separate_async", placement, staleness=0, interrupt=True)
    outcomes = [virtually(run(each, check_batch)) for each in (plan, replace(plan, timing=loose, hurry=other))]
    assert outcomes[0].batches == outcomes[1].batches
