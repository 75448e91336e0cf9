"""Law 7: stop and reward status survive end to end, each value has an explicit policy, and a failure is never a score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from tandem.agents.single_turn import SingleTurn
from tandem.algos.composition import inputs_of
from tandem.algos.functions import advantage_functions
from tandem.algos.table import ALGORITHMS
from tandem.data.fake import FakeDataset
from tandem.data_proto import DataProto
from tandem.ports import LLM
from tandem.trainer.evaluate import EvaluationConfig, evaluate
from tandem.trainer.rows import StopPolicy, episode_rows
from tandem.trainer.source import RolloutConfig
from tandem.types import Episode, Key, Metrics, RewardResult, SamplingParams, Stop, Task
from tests.laws.breaking import Breaker
from tests.trainer.world import FunctionReward, TableEngine, TableLLM, TableRollout, World, world

STOPS: tuple[Stop, ...] = ("stop", "length", "abort", "tool_limit", "error")
CONFIG = RolloutConfig(groups_per_step=2, group_size=5, stops=StopPolicy(tool_limit="mask"))


def ending(stop_of: Callable[[Key], Stop]) -> Callable[[Task, LLM, Key], Any]:
    """An agent whose episodes end as they are told."""

    async def agent(task: Task, llm: LLM, key: Key) -> Episode:
        return replace(await SingleTurn()(task, llm, key), stop=stop_of(key))

    return agent


def one_step(made: World) -> tuple[DataProto, Metrics]:
    """The rows of the first batch, with advantages, and the metrics of the step."""

    async def scenario() -> tuple[DataProto, Metrics]:
        async with aclosing(aiter(made.source)) as batches:
            batch = await anext(batches)
            await made.plan.run(batch)
            rows = await made.queue.get(batch.keys, frozenset({"mask", "stop", "rewards", "advantages"}))
            return rows, await made.source.advance(made.source.policy.next())

    return asyncio.run(scenario())


def check_stops_reach_the_trainer_and_do_what_their_policy_says() -> None:
    made = world(config=CONFIG, agent=ending(lambda key: STOPS[key.member]), reward=lambda e: float(e.key.member))
    rows, metrics = one_step(made)
    for group in rows.split([3, 3]):
        assert group.objects("stop") == ("stop", "length", "tool_limit")
        assert [bool(row["mask"].any()) for row in group.split([1] * 3)] == [True, True, False], "tool_limit is masked"
        signs = [float(row["advantages"].sum().sign()) for row in group.split([1] * 3)]
        assert signs == [-1, -1, 0], "the masked episode counts in its group's mean: 1 is below that of 0, 1 and 3"
    assert metrics["rollout/dropped_abort"].value == metrics["rollout/dropped_error"].value == 2
    assert metrics["queue/dropped/abort"].value == metrics["queue/dropped/error"].value == 2


def check_an_unfinished_episode_is_never_judged() -> None:
    made = world(config=CONFIG, agent=ending(lambda key: STOPS[key.member]))
    one_step(made)
    assert made.reward.judged
    assert not [episode.key for episode in made.reward.judged if episode.stop in ("abort", "error")]


def check_a_failed_reward_leaves_its_group_and_is_no_zero() -> None:
    def reward(episode: Episode) -> float | RewardResult:
        return RewardResult.failed("timeout") if episode.key.member == 0 else 1.0

    rows, metrics = one_step(world(config=CONFIG, reward=reward))
    assert {key.member for key in rows.keys} == {1, 2, 3, 4}
    assert not rows["advantages"].any(), "equal rewards teach nothing, unless the failure passed for a 0"
    assert metrics["reward/mean"].value == 1.0
    assert metrics["rollout/dropped_reward_failed"].value == 2


def check_a_group_that_is_too_small_is_dropped_and_gives_its_slot_back() -> None:
    def reward(episode: Episode) -> float | RewardResult:
        return RewardResult.failed("timeout") if episode.key.ordinal in (0, 2) and episode.key.member else float(episode.key.member)

    rows, metrics = one_step(world(config=CONFIG, reward=reward, stall_limit_s=0.2))
    assert sorted({key.ordinal for key in rows.keys}) == [1, 3]
    assert metrics["rollout/dropped_groups"].value == 2
    assert metrics["queue/dropped/group_too_small"].value == 2, "the one judged episode of each"
    assert metrics["queue/dropped/reward_failed"].value == 8


def check_evaluation_counts_failures_apart() -> None:
    engine, rollout = TableEngine(), TableRollout()
    result = asyncio.run(
        evaluate(
            FakeDataset(size=4),
            ending(lambda key: "abort" if key.ordinal == 0 else "stop"),
            FunctionReward(lambda episode: RewardResult.failed("timeout") if episode.key.ordinal == 1 else 1.0),
            lambda key, seed, params: TableLLM(engine, rollout, key, seed, params),
            SamplingParams(),
            EvaluationConfig(greedy=False),
            seed=0,
        )
    )
    assert (result.pass_at_1, result.failed, result.n) == (1.0, 2, 4)


def test_stops_reach_the_trainer_and_do_what_their_policy_says() -> None:
    check_stops_reach_the_trainer_and_do_what_their_policy_says()


def test_an_unfinished_episode_is_never_judged() -> None:
    check_an_unfinished_episode_is_never_judged()


def test_a_failed_reward_leaves_its_group_and_is_no_zero() -> None:
    check_a_failed_reward_leaves_its_group_and_is_no_zero()


def test_a_group_that_is_too_small_is_dropped_and_gives_its_slot_back() -> None:
    check_a_group_that_is_too_small_is_dropped_and_gives_its_slot_back()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_compares_the_episodes_of_a_group_needs_two(name: str) -> None:
    """A group is dropped with fewer; what reads no groups trains on each episode that is left."""
    row = ALGORITHMS[name]
    functions = advantage_functions(row.advantage) if row.advantage is not None else ()
    assert row.min_episodes == (2 if any("groups_B" in inputs_of(each) for each in functions) else 1)


def test_evaluation_counts_failures_apart() -> None:
    check_evaluation_counts_failures_apart()


BREAKERS = [
    Breaker(
        7,
        "every stop is trained on",
        "tandem.trainer.rows:StopPolicy.action",
        lambda self, stop: "train",
        check_an_unfinished_episode_is_never_judged,
    ),
    Breaker(
        7,
        "masking is forgotten",
        "tandem.trainer.source:episode_rows",
        lambda episodes, policy: episode_rows(episodes, StopPolicy()),
        check_stops_reach_the_trainer_and_do_what_their_policy_says,
    ),
    Breaker(
        7,
        "a failed reward is a 0",
        "tandem.types:RewardResult.failed",
        classmethod(lambda cls, reason: cls(0.0)),
        check_a_failed_reward_leaves_its_group_and_is_no_zero,
    ),
    Breaker(
        7,
        "a dropped group keeps its slot",
        "tandem.trainer.gate:Gate.give_back",
        lambda self: None,
        check_a_group_that_is_too_small_is_dropped_and_gives_its_slot_back,
    ),
    Breaker(
        7,
        "evaluation takes a failure for a 0",
        "tandem.types:RewardResult.failed",
        classmethod(lambda cls, reason: cls(0.0)),
        check_evaluation_counts_failures_apart,
    ),
]
