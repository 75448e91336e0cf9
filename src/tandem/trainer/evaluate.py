"""How good the policy is on held-out tasks: the same agent, LLM and reward as in training, and nothing is trained on.

An episode that failed, or whose reward did, is counted and left out; it is never a 0. Randomness depends on the run's
seed and the task alone, so two evaluations differ by the policy and nothing else.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tandem import stacks
from tandem.errors import DataError, RewardError, RunError, StalledError
from tandem.ports import AgentLoop, Dataset, Reward
from tandem.trainer.episodes import RAISED, first_error, run_episode
from tandem.trainer.rows import StopPolicy, to_judge, with_rewards
from tandem.trainer.sampler import seed_of
from tandem.trainer.source import MakeLLM
from tandem.types import Episode, Key, Metric, Metrics, RewardResult, SamplingParams


@dataclass(frozen=True)
class EvaluationConfig:
    """tasks: how many of the held-out tasks, from the first. samples: sampled episodes of each. pass_at: the k of
    pass@k, each at most `samples`. solved: the reward from which an episode passes. greedy: one greedy episode a task too.
    max_tokens: new tokens of an episode at most; null is sampling.max_tokens, and where it is another, both are measured.
    max_concurrent: episodes at once. stall_limit_s: how long no task may end before the evaluation gives up.
    """

    tasks: int = 256
    samples: int = 1
    pass_at: tuple[int, ...] = ()
    solved: float = 1.0
    greedy: bool = True
    max_tokens: int | None = None
    max_concurrent: int = 256
    stall_limit_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("tasks", "samples", "max_concurrent"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not all(1 <= k <= self.samples for k in self.pass_at):
            raise ValueError(f"pass_at={self.pass_at} needs 1 to samples={self.samples} each: pass@k takes k or more samples")
        if not self.stall_limit_s > 0:
            raise ValueError(f"stall_limit_s must be positive, got {self.stall_limit_s}")


@dataclass(frozen=True)
class EvalResult:
    """pass_at_1: mean over tasks of the share of its judged samples that pass. greedy: the share of judged greedy ones,
    or None where there are none. pass_at: k to the mean over tasks with at least k judged samples. reward: mean of the
    judged samples. cut_off: the share of all episodes, greedy ones included, that ended for their length. n: tasks.
    failed: episodes that could not be judged. episodes: the sampled ones, each with a reward or the reason why not, in
    key order; greedy_episodes likewise.
    """

    pass_at_1: float
    greedy: float | None
    pass_at: Mapping[int, float]
    reward: float
    cut_off: float
    n: int
    failed: int
    seconds: float
    episodes: tuple[Episode, ...]
    greedy_episodes: tuple[Episode, ...]

    def metrics(self) -> Metrics:
        """Each a mean over `n` tasks or a count."""
        means = {"pass@1": self.pass_at_1, "reward": self.reward, "cut_off": self.cut_off} | {
            f"pass@{k}": value for k, value in self.pass_at.items()
        }
        if self.greedy is not None:
            means["greedy"] = self.greedy
        counts = Metrics({name: Metric(value, reduction="sum") for name, value in (("n", self.n), ("failed", self.failed))})
        return Metrics.mean(means, self.n) + counts + Metrics.sum({"time_s": self.seconds})


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k samples passes, unbiased, when c of n did: 1 - C(n - c, k) / C(n, k) (2107.03374)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


async def evaluate(
    dataset: Dataset,
    agent: AgentLoop,
    reward: Reward,
    make_llm: MakeLLM,
    params: SamplingParams,
    config: EvaluationConfig,
    *,
    seed: int,
) -> EvalResult:
    """Raises DataError for an empty dataset, StalledError without progress; where no sample could be judged, RewardError if the
    reward raised for each, else RunError.
    """
    began_s = time.perf_counter()
    n = min(config.tasks, len(dataset))
    if n == 0:
        raise DataError(f"dataset {dataset.name!r} has no tasks to evaluate on")
    seed = seed_of(seed, "eval")
    room = asyncio.Semaphore(config.max_concurrent)
    ended = 0

    async def cohort(ordinal: int, members: range, params: SamplingParams) -> list[Episode]:
        """Episodes of one task that are judged together, each with a reward."""
        nonlocal ended
        task = dataset[ordinal].asked()

        async def one(member: int) -> Episode:
            key = Key("eval", ordinal, member)
            async with room:
                return await run_episode(agent, task, make_llm(key, seed, params), key)

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(member), name=f"episode eval:{ordinal}.{member}") for member in members]
        episodes = [episode.result() for episode in running]
        judged, dropped = to_judge(episodes, StopPolicy())
        if judged:
            judged = with_rewards(task, judged, await reward(task, judged))
        lost = [
            replace(episode, reward=RewardResult.failed(episode.error or dropped[episode.key]))
            for episode in episodes
            if episode.key in dropped
        ]
        ended += 1
        return [*judged, *lost]

    async def watch() -> None:
        while True:
            before = ended
            await asyncio.sleep(config.stall_limit_s)
            if ended == before:
                raise StalledError(
                    f"evaluation waited {config.stall_limit_s:g} s for any of {len(cohorts) - ended} tasks to end and none did: "
                    f"look at the engine, the environment and the reward, or raise stall_limit_s. "
                    f"Where this process stands:\n{stacks.of_tasks()}"
                )

    try:
        async with asyncio.TaskGroup() as group:
            cohorts = [group.create_task(cohort(i, range(config.samples), params)) for i in range(n)]
            if config.greedy:
                last = range(config.samples, config.samples + 1)
                cohorts += [group.create_task(cohort(i, last, replace(params, temperature=0.0))) for i in range(n)]
            watcher = group.create_task(watch())
            await asyncio.wait(cohorts)
            watcher.cancel()
    except BaseExceptionGroup as problems:
        problem = first_error(problems)
        raise problem from problem.__cause__
    episodes = sorted((episode for cohort in cohorts for episode in cohort.result()), key=lambda episode: episode.key)
    return _result(episodes, n, config, time.perf_counter() - began_s)


def _result(episodes: Sequence[Episode], n: int, config: EvaluationConfig, seconds: float) -> EvalResult:
    sampled = tuple(episode for episode in episodes if episode.key.member < config.samples)
    greedy = tuple(episode for episode in episodes if episode.key.member >= config.samples)
    rewards: dict[int, list[float]] = {}
    for episode in sampled:
        if (value := _value(episode)) is not None:
            rewards.setdefault(episode.key.ordinal, []).append(value)
    greedy_rewards = [value for episode in greedy if (value := _value(episode)) is not None]
    if not rewards:
        first = sampled[0]
        reason = first.reward.reason if first.reward is not None else first.stop
        about = f"{first.key} (task {first.task.id!r}): {reason}"
        none = f"none of {n} evaluated tasks has a sample that could be judged; the first: {about}"
        if all(episode.reward is not None and episode.reward.raised for episode in sampled):
            raise RewardError(f"{none}; {RAISED}")
        raise RunError(none)

    def passes(values: Sequence[float]) -> int:
        return sum(value >= config.solved for value in values)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    pass_at: dict[int, float] = {}
    for k in config.pass_at:
        enough = [pass_at_k(len(values), passes(values), k) for values in rewards.values() if len(values) >= k]
        if enough:
            pass_at[k] = mean(enough)
    return EvalResult(
        pass_at_1=mean([passes(values) / len(values) for values in rewards.values()]),
        greedy=passes(greedy_rewards) / len(greedy_rewards) if greedy_rewards else None,
        pass_at=pass_at,
        reward=mean([value for values in rewards.values() for value in values]),
        cut_off=sum(episode.stop == "length" for episode in episodes) / len(episodes),
        n=n,
        failed=sum(_value(episode) is None for episode in episodes),
        seconds=seconds,
        episodes=sampled,
        greedy_episodes=greedy,
    )


def _value(episode: Episode) -> float | None:
    return None if episode.reward is None else episode.reward.value
