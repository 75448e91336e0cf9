"""Batches from rollouts: tasks go in, groups of judged episodes come out as rows of the queue.

Life of a group:  admit (gate, places reserved) -> episodes, side by side -> reward -> verdict -> rows put, or dropped
                  and its slot given back, so that another is admitted
                  rows put -> stages that run ahead of the batch (ahead.py) -> taken

In sync mode a step trains on the first `groups_per_step` groups, in admission order, that are kept: groups are admitted
one for each that is dropped, and what becomes of a group depends on its ordinal and the policy, never on timing.

Where column `reward_baselines` is read, a group has a greedy companion: one more episode of its task, sampled greedily by the
same engines at the same time under a key of its own (space "train.greedy"), judged by itself and never trained on. A group
whose greedy answer could not be judged is dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch

from tandem.algos.functions import keep_function
from tandem.data_proto import DataProto
from tandem.errors import RewardError, RunError
from tandem.faults import crash_point
from tandem.ports import LLM, AgentLoop, Dataset, Lease, Reward, RolloutEngine, TransferQueue, WorkerGroup
from tandem.track.trace import Span
from tandem.trainer.ahead import run_ahead
from tandem.trainer.credit import credit
from tandem.trainer.episodes import RAISED, first_error, run_episode, until_enough
from tandem.trainer.handover import Side, hand_over
from tandem.trainer.intake import Intake
from tandem.trainer.plan import NOTHING, Plan
from tandem.trainer.rows import (
    StopPolicy,
    Verdict,
    episode_rows,
    group_metrics,
    reward_components,
    to_judge,
    verdict,
    with_rewards,
)
from tandem.trainer.sampler import TaskOrder, seed_of
from tandem.trainer.schedule import Schedule
from tandem.trainer.shaping import ShapingConfig, shaped, shaping_metrics
from tandem.trainer.timeline import Timeline
from tandem.types import Algorithm, BatchRef, Episode, GroupKey, Json, Key, Metric, Metrics, PolicyRef, SamplingParams, Task

MakeLLM = Callable[[Key, int, SamplingParams], LLM]
"""(key, seed, params) -> the LLM of one episode."""
Watch = Callable[[], Coroutine[Any, Any, None]]
"""Raises, some time, why nothing that is sampled would be of use."""


@dataclass(frozen=True)
class RolloutConfig:
    """groups_per_step: tasks in a batch. group_size: episodes of each. max_refills_per_step: how many groups of one
    step may be dropped and replaced (too small, or refused by dynamic sampling) before the run stops. stops, shaping: what
    becomes of an episode, and of its reward, by how it stopped and how long it is.

    spare_groups: so many more are begun than a step trains on, in sync mode; the step takes the first that are complete, and the
    others are cut off. enough_episodes: of a group, so many; once they have ended the others are cut off, and 0 waits for all.
    Both leave out what takes long, and so favour what is short. engines: that sample; several have processes of their own. lend:
    trainers may sample while they wait for a batch, in separate_async.
    """

    groups_per_step: int = 16
    group_size: int = 16
    engines: int = 1
    lend: bool = False
    max_refills_per_step: int = 128
    spare_groups: int = 0
    enough_episodes: int = 0
    stops: StopPolicy = field(default_factory=StopPolicy)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)

    def __post_init__(self) -> None:
        names = ("groups_per_step", "group_size", "engines", "max_refills_per_step", "spare_groups", "enough_episodes")
        for name, value in zip(names, (1, 1, 1, 0, 0, 0), strict=True):
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if self.enough_episodes >= self.group_size > 1 or self.enough_episodes > self.group_size:
            raise ValueError(
                f"enough_episodes={self.enough_episodes} must be below group_size={self.group_size}, or 0 for all of them"
            )

    @property
    def waited_for(self) -> int:
        """Episodes of a group that may be left of it."""
        return self.enough_episodes or self.group_size


@dataclass(frozen=True)
class _Cohort:
    """Episodes of one task that were judged together; `judged` have a reward, where there is one, `dropped` a reason why not."""

    episodes: list[Episode]
    judged: list[Episode]
    dropped: dict[Key, str]

    @property
    def ended(self) -> list[Episode]:
        """All of them as far as they got, judged where they were, in key order."""
        judged = {episode.key: episode for episode in self.judged}
        return [judged.get(episode.key, episode) for episode in self.episodes]

    @property
    def good(self) -> list[Episode]:
        """Those whose reward did not fail."""
        return [episode for episode in self.judged if episode.reward is None or episode.reward.ok]


_LOG = "group_log"
"""Object column: what is logged of a group with the step that trains on it, in its first row: it goes where the rows go."""


class RolloutSource:
    """Implements ports.Source. One iteration at a time; see the module's docstring.

    ahead: stages that run on groups as they are put, while others are sampled; a batch has their columns.
    reward: None where nobody judges, and column `rewards` is not given. reads: the columns that the plan and the update read; of
    those in `costly` only these are made. components: the names of column `reward_components`, in order; each reward must have
    them. watch: ends the wait for a batch. trainers: by role, those that share the engines' device; the engines read the weights of
    role "policy" where they are. record: of an episode, for people, from when its group is put. tells: the columns that credit.py
    adds to it, which a batch has when it was trained on.
    """

    costly: ClassVar[frozenset[str]] = frozenset({"reward_baselines", "reward_components"})
    columns: ClassVar[frozenset[str]] = costly | {
        *("tokens", "mask", "rollout_logprobs", "temperature", "full_support", "policy", "stop", "rewards", "turns")
    }
    """Of the rows that it can give."""

    def __init__(
        self,
        *,
        dataset: Dataset,
        agent: AgentLoop,
        reward: Reward | None,
        make_llm: MakeLLM,
        params: SamplingParams,
        queue: TransferQueue,
        engines: Sequence[RolloutEngine],
        algorithm: Algorithm,
        schedule: Schedule,
        config: RolloutConfig,
        seed: int,
        policy: PolicyRef,
        reads: frozenset[str],
        record: Callable[[Episode], dict[str, Json]],
        ahead: Plan = NOTHING,
        tells: frozenset[str] = frozenset(),
        components: Sequence[str] = (),
        watch: Watch | None = None,
        trainers: Mapping[str, WorkerGroup] | None = None,
        space: str = "train",
        shuffled: bool = True,
    ) -> None:
        self.dataset, self._agent, self._reward = dataset, agent, reward
        self._make_llm, self._params, self._seed = make_llm, params, seed
        self._queue, self._engines, self._trainers = queue, tuple(engines), trainers or {}
        self._schedule, self._config = schedule, config
        self._reads, self._components, self._record = reads, tuple(components), record
        self._min_episodes = algorithm.min_episodes
        self._keep = keep_function(algorithm.keep) if algorithm.keep is not None else None
        self._order = TaskOrder(len(dataset), seed_of(seed, space), f"dataset {dataset.name!r}", shuffled=shuffled)
        self._ahead, self._tells, self._watch = ahead, tells, watch
        taken = ahead.gives | {"tokens", "mask"}
        self._intake = Intake(queue, space, config.groups_per_step, schedule, policy, taken, spare=config.spare_groups)
        self._running: set[GroupKey] = set()  # admitted, and neither put nor dropped
        self._sampled: dict[GroupKey, asyncio.Task[None]] = {}  # of those, whose episodes are not all judged
        self._waiting: dict[GroupKey, Sequence[Key]] = {}  # rows that are put and not trained on, by this source's account
        self._tally = _Tally()
        self._metrics = Metrics()
        self._dropped: list[dict[str, Json]] = []  # records of groups that were dropped since the last step
        self.settled: tuple[Mapping[str, Json], ...] = ()
        """Records of the episodes that the last step trained on, in key order, with their credit, and of groups dropped since."""
        self._timeline = Timeline()
        self.spans: tuple[Span, ...] = ()
        """What ended on this side between the last two calls of `advance`."""

    @property
    def policy(self) -> PolicyRef:
        return self._intake.policy

    async def __aiter__(self) -> AsyncGenerator[BatchRef]:
        self._timeline = Timeline()
        if self._schedule.placement == "colocated":
            await self._hand_over("rollout")
        behind = [asyncio.create_task(self._admit(), name="admission"), *self._stages()]
        if self._watch is not None:
            behind.append(asyncio.create_task(self._watch(), name="workers"))
        try:
            while True:
                self._intake.open()
                lease = await self._take(behind)
                if self._schedule.staleness:
                    self._metrics += Metrics.sum({"rollout/carried_groups": len(self._running)})
                if self._config.spare_groups:
                    await self._cut(lease.ref.groups)
                    self._tally = _Tally()
                else:
                    self._tally = self._tally.after(max(group.ordinal for group in lease.ref.groups))
                yield self._intake.hand_out(lease)
        finally:
            for task in behind:
                task.cancel()
            await asyncio.gather(*behind, return_exceptions=True)

    async def advance(self, policy: PolicyRef) -> Metrics:
        metrics, self._metrics = self._metrics, Metrics()
        leased = self._intake.leased
        told = await credit(self._queue, leased, self._tells)
        logs = await self._logs(leased.keys)
        trained = [record | told.get(Key.parse(str(record["key"])), {}) for log in logs for record in log["records"]]
        self.settled, self._dropped = (*trained, *self._dropped), []
        self.spans, idle_s = self._timeline.take()
        metrics += Metrics.sum({"time/generation_idle_s": idle_s})
        for group in leased.groups:
            self._waiting.pop(group, None)
        return sum((Metrics.restored(log["metrics"]) for log in logs), metrics) + await self._intake.advance(policy)

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        """Colocated: the device is the trainers' inside, and the rollout engines' after; not after an error, which ends the run."""
        if self._schedule.placement == "separate":
            yield
            return
        with self._timeline.held():
            await self._hand_over("training")
            crash_point("handover.to_trainer")
            yield
            await self._hand_over("rollout")
            crash_point("handover.to_rollout")

    async def _hand_over(self, side: Side) -> None:
        await hand_over(side, self._trainers, self._engines, lent=frozenset({"policy"}))

    def state(self) -> dict[str, Json]:
        """To be read right after the queue's `save`, with nothing awaited in between: the two belong together."""
        running: list[Json] = [group.ordinal for group in sorted(self._running)]
        waiting: list[Json] = [str(key) for rows in self._waiting.values() for key in rows]
        return {
            **self._intake.state(),
            "running": running,
            "waiting": waiting,
            "dropped": [*self._dropped],
            "metrics": self._metrics.state(),
            "tally": self._tally.state(),
        }

    def restore(self, state: Mapping[str, Json]) -> None:
        """Groups that were running start again, unless their rows are in the restored queue: their keys are their randomness."""
        self._intake.restore(state)
        self._running = {GroupKey(self._intake.space, ordinal) for ordinal in cast("list[int]", state["running"])}
        self._waiting = {}
        for key in map(Key.parse, cast("list[str]", state["waiting"])):
            self._waiting[key.group] = (*self._waiting.get(key.group, ()), key)
        self._dropped = cast("list[dict[str, Json]]", state["dropped"])
        self._metrics = Metrics.restored(cast("Mapping[str, Json]", state["metrics"]))
        self._tally = _Tally.restored(cast("Mapping[str, Json]", state["tally"]))

    # ------------------------------------------------------------------------------------------ admission

    async def _admit(self) -> None:
        """Runs groups as the gate lets them in, until it is cancelled or one of them fails."""
        async with asyncio.TaskGroup() as groups:
            for group in sorted(self._running):
                self._start(group, await self._queue.reserve(group, self._config.group_size), groups)
            while True:
                self._start(*await self._intake.admit(self._config.group_size), groups)

    def _start(self, group: GroupKey, places: Collection[Key], groups: asyncio.TaskGroup) -> None:
        """places: that are open; none where the rows came back with the queue, from before this process."""
        if places:
            self._running.add(group)
            self._sampled[group] = groups.create_task(self._group(group), name=f"group {group}")
        else:
            self._running.discard(group)
            self._tally.good[group.ordinal] = self._config.group_size

    async def _cut(self, taken: Collection[GroupKey]) -> None:
        """Ends and drops all groups but those of the batch, so that the next step begins with its own."""
        late = list(self._sampled.values())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)  # an error ends admission, and is raised there
        places = {group: [Key(*group, member) for member in range(self._config.group_size)] for group in self._running}
        for group, rows in list(self._waiting.items()):
            if group not in taken:
                await self._forget(rows, "cut")
                places[group] = sorted({key.place for key in rows})
        for group in sorted(places):
            await self._queue.drop(places[group], "cut")
            self._running.discard(group)
            self._sampled.pop(group, None)
            self._intake.give_back()
        self._metrics += Metrics.sum({"rollout/cut_groups": len(places)})

    async def _forget(self, rows: Sequence[Key], reason: str = "too_old") -> None:
        """A group that is done will not be trained on: its rows are to be dropped."""
        self._waiting.pop(rows[0].group, None)
        for log in await self._logs(rows):
            self._metrics += Metrics.restored(log["metrics"]) + Metrics.sum({"rollout/dropped_groups": 1})
            self._dropped += [_why(reason) | record for record in log["records"]]

    async def _logs(self, rows: Sequence[Key]) -> list[Any]:
        """Of each group of these rows, in order: `records` of its episodes, and the state of its `metrics`."""
        return [log for log in (await self._queue.get(rows, frozenset({_LOG}))).objects(_LOG) if log is not None]

    def _stages(self) -> list[asyncio.Task[None]]:
        """What runs ahead of the batch, until it is cancelled or fails."""

        def report(metrics: Metrics) -> None:
            self._metrics += metrics

        incarnation, most = self.policy.incarnation, self._config.groups_per_step
        return [
            asyncio.create_task(run_ahead(stage, self._queue, incarnation, most, report), name=f"stage {stage.name}")
            for stage in self._ahead.stages
        ]

    async def _take(self, behind: Sequence[asyncio.Task[None]]) -> Lease:
        """The next lease, or the error that ended one of those behind it: then nothing more would ever come."""
        take = asyncio.create_task(self._intake.take(self._forget), name="take")
        try:
            await asyncio.wait({take, *behind}, return_when=asyncio.FIRST_COMPLETED)
            for task in behind:
                if task.done() and (problems := task.exception()) is not None:
                    raise first_error(problems)
            return take.result()
        finally:
            take.cancel()

    async def _group(self, group: GroupKey) -> None:
        task = self.dataset[self._order.position(group.ordinal)].asked()
        keys = [Key(*group, member) for member in range(self._config.group_size)]
        async with asyncio.TaskGroup() as cohorts:
            whole = self._cohort(task, keys, self._params, self._config.stops, self._config.waited_for)
            sampled = cohorts.create_task(whole, name=f"group {group}")
            companion = cohorts.create_task(self._companion(task, group), name=f"companion of group {group}")
        cohort, greedy = sampled.result(), companion.result()
        del self._sampled[group]
        lacks = "greedy_failed" if greedy is not None and not greedy.good else ""
        outcome = verdict(cohort.judged, cohort.dropped, min_episodes=self._min_episodes, keep=self._keep, lacks=lacks)
        crash_point("rollout.before_put")
        # Until the rows are in the queue no other task runs, so a snapshot sees the group either running or done.
        self._running.discard(group)
        self._tally.count(group, cohort, greedy, outcome)
        for place, reason in outcome.dropped.items():
            await self._queue.drop([place], reason)
        metrics = group_metrics(cohort.episodes, cohort.judged, outcome)
        if greedy is not None:
            metrics += _greedy_metrics(greedy)
        records = [self._record(episode) | _why(outcome.dropped.get(episode.key)) for episode in cohort.ended]
        if outcome.kept:
            rows, of_shaping = self._rows(outcome.kept, greedy)
            log = {"records": records, "metrics": (metrics + of_shaping).state()}
            self._waiting[group] = rows.keys
            await self._queue.put(rows.with_columns(objects={_LOG: [log, *[None] * (len(rows) - 1)]}))
            crash_point("rollout.after_put")
        else:
            self._metrics += metrics
            self._dropped += records
            self._intake.give_back()
            self._tally.check(self._config, self.policy, self._running)

    async def _companion(self, task: Task, group: GroupKey) -> _Cohort | None:
        """The greedy one, where its reward is read."""
        if "reward_baselines" not in self._reads:
            return None
        key = Key(f"{group.space}.greedy", group.ordinal)
        return await self._cohort(task, [key], replace(self._params, temperature=0.0), StopPolicy(), 1)

    async def _cohort(self, task: Task, keys: Sequence[Key], params: SamplingParams, stops: StopPolicy, enough: int) -> _Cohort:
        """These episodes, side by side, until `enough` have ended well, and what the reward says of them."""
        with self._timeline.sampling(keys[0].group):
            async with asyncio.TaskGroup() as members:
                running = [
                    members.create_task(run_episode(self._agent, task, self._make_llm(key, self._seed, params), key), name=f"{key}")
                    for key in keys
                ]
                await until_enough(running, enough)
        episodes = [episode.result() for episode in running if not episode.cancelled()]
        judged, dropped = to_judge(episodes, stops)
        dropped |= {key: "cut" for key, episode in zip(keys, running, strict=True) if episode.cancelled()}
        if judged and self._reward is not None:
            crash_point("reward.before")
            with self._timeline.judging(keys[0].group):
                results = await self._reward(task, judged)
            judged = with_rewards(task, judged, results, self._components)
            crash_point("reward.after")
        return _Cohort(episodes, judged, dropped)

    def _rows(self, kept: Sequence[Episode], greedy: _Cohort | None) -> tuple[DataProto, Metrics]:
        """The rows of a group, with the columns that are read, and what shaping did to them."""
        credited = self._shaped(kept)
        rows, more = episode_rows(credited, self._config.stops), dict[str, torch.Tensor]()
        if greedy is not None:
            (baseline,) = _values(self._shaped(greedy.good))
            more["reward_baselines"] = torch.full((len(rows),), baseline)
        if "reward_components" in self._reads:
            more["reward_components"] = reward_components(credited, self._components)
        metrics = shaping_metrics(kept, credited) if self._config.shaping.on else Metrics()
        return rows.with_columns(row=more), metrics

    def _shaped(self, episodes: Sequence[Episode]) -> list[Episode]:
        return shaped(episodes, self._config.shaping, max_tokens=self._params.max_tokens)


@dataclass(slots=True)
class _Tally:
    """What became of the groups and episodes of the step that is being filled.

    good: episodes with a reward, by ordinal of a group that is done, were it done while an earlier step was being filled. raised:
    those of `failed` for which the reward raised.
    """

    good: dict[int, int] = field(default_factory=dict[int, int])
    failed: int = 0
    raised: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    first: str = ""

    def count(self, group: GroupKey, cohort: _Cohort, greedy: _Cohort | None, outcome: Verdict) -> None:
        self.good[group.ordinal] = len(cohort.good)
        if outcome.reason:
            self.refused[outcome.reason] += 1
        for each in (cohort,) if greedy is None else (cohort, greedy):
            self.failed += len(each.episodes) - len(each.good)
            self.raised += sum(episode.reward is not None and episode.reward.raised for episode in each.judged)
            for episode in (*each.judged, *each.episodes):
                self.first = self.first or _complaint(episode)

    def after(self, ordinal: int) -> _Tally:
        """Of the next step, when the groups up to this one were taken."""
        return _Tally({done: good for done, good in self.good.items() if done > ordinal})

    def check(self, config: RolloutConfig, policy: PolicyRef, running: Collection[GroupKey]) -> None:
        """Raises RunError where refilling has no end in sight, RewardError where that is the reward's fault; whether it does
        depends on no group's timing.
        """
        first = f"; the first: {self.first}" if self.first else ""
        begun = sorted({*self.good, *(group.ordinal for group in running)})[: config.groups_per_step]
        if len(begun) == config.groups_per_step and all(self.good.get(ordinal) == 0 for ordinal in begun):
            episodes = f"{len(begun) * config.group_size} episodes that began the step after {policy}"
            if self.raised == self.failed:
                raise RewardError(f"the reward raised for all {episodes}{first}; {RAISED}")
            raise RunError(
                f"all {episodes} failed{first}; look at the reward and the environment. What a lost worker or a clock decided "
                f"stands in the run's journal.jsonl: delete that file before you resume, to have it judged again"
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
        return {"good": good, "failed": self.failed, "raised": self.raised, "refused": refused, "first": self.first}

    @classmethod
    def restored(cls, state: Mapping[str, Json]) -> _Tally:
        good = dict(cast("list[tuple[int, int]]", state["good"]))
        refused = Counter(cast("dict[str, int]", state["refused"]))
        return cls(good, cast("int", state["failed"]), cast("int", state["raised"]), refused, cast("str", state["first"]))


def _complaint(episode: Episode) -> str:
    """What went wrong in an episode, or ""."""
    problem = episode.error or (episode.reward.reason if episode.reward is not None and not episode.reward.ok else "")
    return f"{episode.key} (task {episode.task.id!r}): {problem}" if problem else ""


def _why(dropped: str | None) -> dict[str, Json]:
    return {} if dropped is None else {"dropped": dropped}


def _greedy_metrics(greedy: _Cohort) -> Metrics:
    """Of one group's greedy companion, which is in no other metric."""
    values = _values(greedy.good)
    tokens = sum(int(sample.mask.sum()) for episode in greedy.episodes for sample in episode.samples)
    return Metrics({"reward/greedy": Metric(sum(values), len(values))}) + Metrics.sum(
        {"rollout/greedy_episodes": len(greedy.episodes), "rollout/greedy_tokens": tokens}
    )


def _values(episodes: Sequence[Episode]) -> list[float]:
    return [episode.reward.value for episode in episodes if episode.reward is not None and episode.reward.value is not None]
