"""RolloutSource: which groups a step trains on, and what stops the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.agents.single_turn import SingleTurn
from tandem.data.fake import FakeDataset
from tandem.data_proto import DataProto
from tandem.errors import ColumnError, DataError, EngineError, RewardError, RunError, StalenessError, StalledError
from tandem.ports import LLM, AgentLoop
from tandem.trainer.rows import StopPolicy
from tandem.trainer.source import RolloutConfig
from tandem.types import BatchRef, Episode, Key, PolicyRef, RewardResult, Task
from tests.trainer.world import World, world

SMALL = RolloutConfig(groups_per_step=2, group_size=3, max_refills_per_step=6)


def first_batch(made: World) -> DataProto:
    async def scenario() -> DataProto:
        async with aclosing(aiter(made.source)) as batches:
            batch = await anext(batches)
            return await made.queue.get(batch.keys, frozenset({"rewards", "mask", "stop"}))

    return asyncio.run(scenario())


def ordinals(rows: DataProto | BatchRef) -> list[int]:
    return sorted({key.ordinal for key in rows.keys})


def test_a_step_is_the_first_kept_groups_in_admission_order_whatever_the_timing() -> None:
    async def moody(task: Task, llm: LLM, key: Key) -> Episode:
        """Early groups are slow, so that their refills are admitted last."""
        await asyncio.sleep(0.02 if key.ordinal < 2 else 0)
        return await SingleTurn()(task, llm, key)

    def varied(episode: Episode) -> float:
        return float(episode.key.member) if episode.key.ordinal in (1, 3, 4, 6) else 1.0

    for agent in (moody, SingleTurn()):
        made = world(config=SMALL, algorithm="dapo", reward=varied, agent=agent)
        rows = first_batch(made)
        assert ordinals(rows) == [1, 3]
        drops = made.queue.metrics()
        assert drops["dropped/filtered"].value == 6


def test_refilling_ends_with_a_reason() -> None:
    made = world(config=SMALL, algorithm="dapo", reward=lambda episode: 1.0)
    with pytest.raises(RunError, match=r"7 of 7 groups .* dropped \(7 filtered\), above max_refills_per_step=6.*warm it up"):
        first_batch(made)


def test_a_step_in_which_everything_fails_stops_the_run_with_the_first_message() -> None:
    async def broken(task: Task, llm: LLM, key: Key) -> Episode:
        raise ValueError(f"no tool for {key}")

    with pytest.raises(
        RunError,
        match=r"all 6 episodes .* failed; the first: train:\d\.0\.0 \(task .fake-\d.\): ValueError: no tool for train:\d\.0\.0",
    ):
        first_batch(world(config=SMALL, agent=broken))
    with pytest.raises(RunError, match=r"all 6 episodes .* failed; the first: .*timeout"):
        first_batch(world(config=SMALL, reward=lambda episode: RewardResult.failed("timeout")))


def test_a_reward_that_raises_for_everything_is_its_author_s_mistake() -> None:
    def reward(*raises: int) -> Callable[[Episode], RewardResult]:
        return lambda episode: RewardResult.failed("it raised KeyError", raised=episode.key.member in raises)

    with pytest.raises(RewardError, match=r"raised for all 6 episodes .*; the first: train:0\.0\.0 \(task 'fake-\d'\): it raised"):
        first_batch(world(config=SMALL, reward=reward(0, 1, 2)))
    with pytest.raises(RunError, match=r"all 6 episodes .* failed"):
        first_batch(world(config=SMALL, reward=reward(0, 1)))


def test_whether_failures_stop_the_run_depends_on_no_timing() -> None:
    """A run that is resumed has answers that were waited for at once, and must end as it did."""

    def failing(*bad: int) -> Callable[[Episode], RewardResult]:
        return lambda episode: RewardResult.failed("timeout") if episode.key.ordinal in bad else RewardResult(episode.key.member)

    def slow(ordinal: int) -> AgentLoop:
        async def agent(task: Task, llm: LLM, key: Key) -> Episode:
            await asyncio.sleep(0.05 if key.ordinal == ordinal else 0)
            return await SingleTurn()(task, llm, key)

        return agent

    for late in (0, 1, 2, 3):
        with pytest.raises(RunError, match=r"all 6 episodes that began the step .* failed"):
            first_batch(world(config=SMALL, reward=failing(0, 1), agent=slow(late)))
        assert ordinals(first_batch(world(config=SMALL, reward=failing(0, 2), agent=slow(late)))) == [1, 3]


def test_an_agent_s_exception_is_one_episode_s_outcome() -> None:
    async def clumsy(task: Task, llm: LLM, key: Key) -> Episode:
        if key.member == 1:
            raise ValueError("dropped the tool")
        return await SingleTurn()(task, llm, key)

    made = world(config=SMALL, agent=clumsy)
    rows = first_batch(made)
    assert {key.member for key in rows.keys} == {0, 2}
    assert made.queue.metrics()["dropped/error"].value == 2


@pytest.mark.parametrize(
    ("problem", "match"),
    [
        (EngineError("out of slots"), "out of slots"),
        (DataError("the prompt has 90 tokens"), r"task 'fake-\d': the prompt has 90 tokens"),
    ],
)
def test_errors_that_would_hit_every_episode_stop_the_run(problem: Exception, match: str) -> None:
    async def doomed(task: Task, llm: LLM, key: Key) -> Episode:
        raise problem

    with pytest.raises(type(problem), match=match):
        first_batch(world(config=SMALL, agent=doomed))


def test_an_agent_that_loses_its_key_and_a_reward_that_loses_count_are_refused() -> None:
    async def forgetful(task: Task, llm: LLM, key: Key) -> Episode:
        return replace(await SingleTurn()(task, llm, key), key=Key("train", 0, 99))

    with pytest.raises(ColumnError, match=r"train:0\.99\.0"):
        first_batch(world(config=SMALL, agent=forgetful))

    made = world(config=SMALL)

    async def short(task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        return [RewardResult(1.0)]

    made.source._reward = short  # type: ignore[assignment]
    with pytest.raises(RewardError, match="1 results for 3 episodes"):
        first_batch(made)


def test_masked_episodes_count_in_their_group_and_train_nothing() -> None:
    async def talkative(task: Task, llm: LLM, key: Key) -> Episode:
        episode = await SingleTurn()(task, llm, key)
        return replace(episode, stop="length") if key.member == 0 else episode

    made = world(config=replace(SMALL, stops=StopPolicy(length="mask")), agent=talkative)
    rows = first_batch(made)
    for i, part in enumerate(rows.split([1] * len(rows))):
        assert bool(part["mask"].any()) == (rows.objects("stop")[i] == "stop")
    assert len(rows) == 6


def test_the_episodes_of_the_last_batch_are_kept_for_records() -> None:
    made = world(config=SMALL)

    async def scenario() -> None:
        async with aclosing(aiter(made.source)) as batches:
            batch = await anext(batches)
            assert made.source.settled == ()
            await made.source.advance(PolicyRef(version=1))
            assert [record["key"] for record in made.source.settled] == [str(key) for key in batch.keys]

    asyncio.run(scenario())


def test_engines_stand_still_and_off_the_device_while_training() -> None:
    made = world()

    async def scenario() -> None:
        async with made.source.training():
            assert made.rollout.events == ["pause", "device", "host"]
        assert made.rollout.events[3:] == ["host", "device", "resume"]

    asyncio.run(scenario())


def test_a_stale_row_is_refused_where_it_is_consumed() -> None:
    made = world(policy=PolicyRef(version=5))
    made.rollout.policy = PolicyRef(version=4)
    with pytest.raises(StalenessError, match=r"policy@0\.4 .* policy@0\.5"):
        first_batch(made)


def test_a_hanging_episode_stalls_by_name() -> None:
    async def asleep(task: Task, llm: LLM, key: Key) -> Episode:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(StalledError, match=r"'learner'.*2 whole groups.*train:0 \(3 places open\)"):
        first_batch(world(config=SMALL, agent=asleep, stall_limit_s=0.05))


def test_a_snapshot_in_the_middle_of_rollouts_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Group 0 is in the queue, group 1 is half done and group 2 not admitted when the process dies."""

    async def scenario() -> None:
        gate = asyncio.Event()

        async def waiting(task: Task, llm: LLM, key: Key) -> Episode:
            if key.ordinal == 1 and key.member == 2:
                await gate.wait()
            return await SingleTurn()(task, llm, key)

        first = world(config=SMALL, agent=waiting)
        async with aclosing(aiter(first.source)) as batches:
            asking = asyncio.create_task(anext(batches))  # type: ignore[arg-type]
            while first.queue.metrics()["rows"].value < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await first.queue.save(tmp_path)
            state = first.source.state()
            assert state["running"] == [1]
            gate.set()
            undisturbed = await asking
            expected = await first.queue.get(undisturbed.keys, frozenset({"tokens", "rewards"}))

        second = world(config=SMALL)
        await second.queue.restore("s", tmp_path)
        second.source.restore(state)
        async with aclosing(aiter(second.source)) as batches:
            batch = await anext(batches)
            got = await second.queue.get(batch.keys, frozenset({"tokens", "rewards"}))
        assert got.keys == expected.keys
        assert got["tokens"].equal(expected["tokens"])
        assert {episode.key.ordinal for episode in second.reward.judged} == {1}

    asyncio.run(scenario())


def test_an_empty_dataset_is_the_user_s_mistake() -> None:
    with pytest.raises(DataError, match="dataset 'nothing' has no tasks"):
        world(dataset=FakeDataset([], name="nothing"))


@pytest.mark.parametrize("bad", [{"groups_per_step": 0}, {"group_size": 0}, {"max_refills_per_step": -1}])
def test_config_says_what_is_wrong(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RolloutConfig(**bad)
