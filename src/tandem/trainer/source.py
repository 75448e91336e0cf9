"""Batches from rollouts: tasks go in, groups of judged episodes come out as rows of the queue.

Life of a group:  admit (gate, places reserved) -> episodes, side by side -> reward -> verdict -> rows put, or dropped
                  and its slot given back, so that another is admitted

In sync mode a step trains on the first `groups_per_step` groups, in admission order, that are kept: groups are admitted
one for each that is dropped, and what becomes of a group depends on its ordinal and the policy, never on timing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar, cast

from tandem.algos.functions import keep_function
from tandem.errors import RunError
from tandem.faults import crash_point
from tandem.ports import LLM, AgentLoop, Dataset, Lease, Reward, RolloutEngine, TransferQueue
from tandem.trainer.episodes import first_error, run_episode
from tandem.trainer.intake import Intake
from tandem.trainer.rows import StopPolicy, Verdict, group_metrics, to_judge, verdict, with_rewards
from tandem.trainer.sampler import TaskOrder, seed_of
from tandem.trainer.schedule import Schedule
from tandem.types import Algorithm, BatchRef, Episode, GroupKey, Json, Key, Metrics, PolicyRef, SamplingParams, Task

MakeLLM = Callable[[Key, int, SamplingParams], LLM]
"""(key, seed, params) -> the LLM of one episode."""


@dataclass(frozen=True)
class RolloutConfig:
    """groups_per_step: tasks in a batch. group_size: episodes of each. max_refills_per_step: how many groups of one
    step may be dropped and replaced (too small, or refused by dynamic sampling) before the run stops.
    """

    groups_per_step: int = 16
    group_size: int = 16
    max_refills_per_step: int = 128
    stops: StopPolicy = field(default_factory=StopPolicy)

    def __post_init__(self) -> None:
        for name, least in (("groups_per_step", 1), ("group_size", 1), ("max_refills_per_step", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


class RolloutSource:
    """Implements ports.Source. One iteration at a time; see the module's docstring."""

    columns: ClassVar[frozenset[str]] = frozenset(
        {"tokens", "mask", "rollout_logprobs", "temperature", "full_support", "policy", "stop", "rewards"}
    )
    """Of the rows that it gives."""

    def __init__(
        self,
        *,
        dataset: Dataset,
        agent: AgentLoop,
        reward: Reward,
        make_llm: MakeLLM,
        params: SamplingParams,
        queue: TransferQueue,
        engines: Sequence[RolloutEngine],
        algorithm: Algorithm,
        schedule: Schedule,
        config: RolloutConfig,
        seed: int,
        policy: PolicyRef,
        space: str = "train",
    ) -> None:
        self._dataset, self._agent, self._reward = dataset, agent, reward
        self._make_llm, self._params, self._seed = make_llm, params, seed
        self._queue, self._engines = queue, tuple(engines)
        self._schedule, self._config = schedule, config
        self._min_episodes = algorithm.min_episodes
        self._keep = keep_function(algorithm.keep) if algorithm.keep is not None else None
        self._order = TaskOrder(len(dataset), seed_of(seed, space), f"dataset {dataset.name!r}")
        self._intake = Intake(queue, space, config.groups_per_step, schedule, policy)
        self._running: set[GroupKey] = set()  # admitted, and neither put nor dropped
        self._tally = _Tally()
        self._metrics = Metrics()
        self._judged: dict[GroupKey, list[Episode]] = {}  # of groups that are put and not consumed
        self.consumed: tuple[Episode, ...] = ()
        """Episodes of the batch that was trained on last, in key order: for records. Rows of a restored queue have none."""

    @property
    def policy(self) -> PolicyRef:
        return self._intake.policy

    async def __aiter__(self) -> AsyncGenerator[BatchRef]:
        admission = asyncio.create_task(self._admit(), name="admission")
        try:
            while True:
                self._intake.open()
                lease = await self._take(admission)
                self._tally = _Tally()
                yield self._intake.hand_out(lease)
        finally:
            admission.cancel()
            await asyncio.gather(admission, return_exceptions=True)

    async def advance(self, policy: PolicyRef) -> Metrics:
        metrics, self._metrics = self._metrics, Metrics()
        groups = self._intake.leased.groups
        self.consumed = tuple(episode for group in groups for episode in self._judged.pop(group, ()))
        return metrics + await self._intake.advance(policy)

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        """Colocated: engines are paused and off the device inside, and back and running after."""
        shared = self._engines if self._schedule.placement == "colocated" else ()
        for engine in shared:
            await engine.pause()
            await engine.place("host")
        try:
            yield
        finally:
            for engine in shared:
                await engine.place("device")
                await engine.resume()

    def state(self) -> dict[str, Json]:
        """To be read right after the queue's `save`, with nothing awaited in between: the two belong together."""
        running: list[Json] = [group.ordinal for group in sorted(self._running)]
        return {**self._intake.state(), "running": running, "tally": self._tally.state()}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Groups that were running start again: the restored queue holds their places, their keys their randomness."""
        self._intake.restore(state)
        self._running = {GroupKey(self._intake.space, ordinal) for ordinal in cast("list[int]", state["running"])}
        self._tally = _Tally.restored(cast("Mapping[str, Json]", state["tally"]))

    # ------------------------------------------------------------------------------------------ admission

    async def _admit(self) -> None:
        """Runs groups as the gate lets them in, until it is cancelled or one of them fails."""
        async with asyncio.TaskGroup() as groups:
            for group in sorted(self._running):
                groups.create_task(self._group(group), name=f"group {group}")
            while True:
                group = await self._intake.admit(self._config.group_size)
                self._running.add(group)
                groups.create_task(self._group(group), name=f"group {group}")

    async def _take(self, admission: asyncio.Task[None]) -> Lease:
        """The next lease, or the error that ended admission: then nothing more would ever come."""
        take = asyncio.create_task(self._intake.take(), name="take")
        try:
            await asyncio.wait({take, admission}, return_when=asyncio.FIRST_COMPLETED)
            if admission.done() and (problems := admission.exception()) is not None:
                raise first_error(problems)
            return take.result()
        finally:
            take.cancel()

    async def _group(self, group: GroupKey) -> None:
        task = self._dataset[self._order.position(group.ordinal)].asked()
        episodes = await self._episodes(task, group)
        judged, dropped = to_judge(episodes, self._config.stops)
        if judged:
            judged = with_rewards(task, judged, await self._reward(task, judged))
        outcome = verdict(judged, dropped, self._config.stops, min_episodes=self._min_episodes, keep=self._keep)
        crash_point("rollout.before_put")
        # From here to the end no other task runs, so a snapshot sees the group either running or done.
        for place, reason in outcome.dropped.items():
            await self._queue.drop([place], reason)
        if outcome.rows is not None:
            await self._queue.put(outcome.rows)
            self._judged[group] = judged
        self._running.discard(group)
        self._metrics += group_metrics(episodes, judged, outcome)
        self._tally.count(group, episodes, judged, outcome)
        if outcome.rows is None:
            self._intake.give_back()
            self._tally.check(self._config, self.policy, self._running)

    async def _episodes(self, task: Task, group: GroupKey) -> list[Episode]:
        keys = [Key(*group, member) for member in range(self._config.group_size)]
        async with asyncio.TaskGroup() as members:
            running = [
                members.create_task(
                    run_episode(self._agent, task, self._make_llm(key, self._seed, self._params), key), name=f"{key}"
                )
                for key in keys
            ]
        return [episode.result() for episode in running]


@dataclass(slots=True)
class _Tally:
    """What became of the groups and episodes of the step that is being filled. good: episodes with a reward, by ordinal."""

    good: dict[int, int] = field(default_factory=dict[int, int])
    failed: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    first: str = ""

    def count(self, group: GroupKey, episodes: Sequence[Episode], judged: Sequence[Episode], outcome: Verdict) -> None:
        good = sum(episode.reward is not None and episode.reward.ok for episode in judged)
        self.good[group.ordinal] = good
        self.failed += len(episodes) - good
        if outcome.reason:
            self.refused[outcome.reason] += 1
        for episode in (*judged, *episodes):
            self.first = self.first or _complaint(episode)

    def check(self, config: RolloutConfig, policy: PolicyRef, running: Collection[GroupKey]) -> None:
        """Raises RunError where refilling has no end in sight: whether it does depends on no group's timing."""
        first = f"; the first: {self.first}" if self.first else ""
        begun = sorted({*self.good, *(group.ordinal for group in running)})[: config.groups_per_step]
        if len(begun) == config.groups_per_step and all(self.good.get(ordinal) == 0 for ordinal in begun):
            raise RunError(
                f"all {len(begun) * config.group_size} episodes that began the step after {policy} failed{first}; "
                f"look at the reward and the environment"
            )
        if self.refused.total() > config.max_refills_per_step:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
            raise RunError(
                f"{self.refused.total()} of {len(self.good)} groups of the step after {policy} were dropped ({reasons}), above "
                f"max_refills_per_step={config.max_refills_per_step}; failed episodes: {self.failed}{first}. Filtered groups mean "
                f"that the policy always or never solves these tasks: warm it up, mix in other tasks or raise group_size; "
                f"or raise max_refills_per_step"
            )

    def state(self) -> dict[str, Json]:
        good: list[Json] = [[ordinal, count] for ordinal, count in self.good.items()]
        refused: dict[str, Json] = dict(self.refused)
        return {"good": good, "failed": self.failed, "refused": refused, "first": self.first}

    @classmethod
    def restored(cls, state: Mapping[str, Json]) -> _Tally:
        good = dict(cast("list[tuple[int, int]]", state["good"]))
        refused = Counter(cast("dict[str, int]", state["refused"]))
        return cls(good, cast("int", state["failed"]), refused, cast("str", state["first"]))


def _complaint(episode: Episode) -> str:
    """What went wrong in an episode, or ""."""
    if episode.error:
        return f"{episode.key}: {episode.error}"
    if episode.reward is not None:
        return f"{episode.key}: {episode.reward.reason}" if not episode.reward.ok else ""
    return ""
