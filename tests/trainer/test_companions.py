"""What a source makes only where an algorithm reads it: greedy companions of groups, and named parts of rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.agents.single_turn import SingleTurn
from tandem.data_proto import DataProto
from tandem.errors import RewardError, RunError
from tandem.ports import LLM
from tandem.trainer.shaping import ShapingConfig
from tandem.trainer.source import RolloutConfig, RolloutSource
from tandem.types import Episode, Key, Metrics, PolicyRef, RewardResult, Task
from tests.trainer.test_loop import run_world
from tests.trainer.world import World, world

SMALL = RolloutConfig(groups_per_step=2, group_size=3, max_refills_per_step=3)
READ = frozenset({"rewards", "reward_baselines"})


def batches_of(made: World, num: int, columns: frozenset[str]) -> tuple[list[DataProto], Metrics]:
    """The first batches, each trained on by adding to the table, and the metrics of all of them."""

    async def scenario() -> tuple[list[DataProto], Metrics]:
        out: list[DataProto] = []
        metrics = Metrics()
        async with aclosing(aiter(made.source)) as batches:
            async for batch in batches:
                out.append(await made.queue.get(batch.keys, columns))
                made.engine.table.data[len(out)] += 10 * len(out)
                policy = made.source.policy.next()
                made.rollout.policy = policy
                metrics += await made.source.advance(policy)
                if len(out) == num:
                    break
        return out, metrics

    return asyncio.run(scenario())


def letter(episode: Episode) -> float:
    """Each letter its own reward, and each task too."""
    return "abcd".index(episode.completion[0]) + len(episode.task.messages[0].content) / 100


def greedy(episode: Episode) -> bool:
    return episode.key.space == "train.greedy"


def test_a_group_has_the_reward_of_its_task_s_greedy_answer_by_the_policy_of_its_own_rows() -> None:
    made = world(algorithm="remax", config=SMALL, reward=letter)
    (first, second), metrics = batches_of(made, 2, READ | {"policy"})
    companions = {episode.key.ordinal: episode for episode in made.reward.judged if greedy(episode)}
    assert sorted(companions) == [0, 1, 2, 3]
    assert {episode.completion for episode in companions.values()} == {"aa", "bb"}
    for rows, version in ((first, 0), (second, 1)):
        assert {key.space for key in rows.keys} == {"train"}
        for key, baseline in zip(rows.keys, rows["reward_baselines"].tolist(), strict=True):
            companion = companions[key.ordinal]
            assert baseline == pytest.approx(letter(companion))
            assert companion.samples[0].policy == ((PolicyRef(version=version), 2),)
            assert companion.task == next(each.task for each in made.reward.judged if each.key == key)
    assert metrics["rollout/greedy_episodes"].value == 4
    assert metrics["rollout/greedy_tokens"].value == 8
    assert metrics["rollout/episodes"].value == 12
    assert metrics["reward/greedy"].count == 4


def test_a_companion_changes_no_sampled_row() -> None:
    with_one, _ = batches_of(world(algorithm="remax", config=SMALL), 2, frozenset({"tokens", "rewards"}))
    without, _ = batches_of(world(algorithm="reinforce", config=SMALL), 2, frozenset({"tokens", "rewards"}))
    for mine, other in zip(with_one, without, strict=True):
        assert mine.keys == other.keys
        assert mine["tokens"].equal(other["tokens"])


def test_nobody_pays_for_a_companion_that_no_algorithm_reads() -> None:
    made = world(algorithm="rloo", config=SMALL)
    _, metrics = batches_of(made, 1, frozenset({"rewards"}))
    assert not [episode for episode in made.reward.judged if greedy(episode)]
    assert "rollout/greedy_episodes" not in metrics


def failing(problem: str) -> Callable[[Episode], float | RewardResult]:
    return lambda episode: RewardResult.failed(problem) if greedy(episode) and episode.key.ordinal < 2 else letter(episode)


def test_a_group_whose_companion_failed_is_dropped_with_that_reason_and_replaced() -> None:
    made = world(algorithm="remax", config=SMALL, reward=failing("timeout"))
    (rows,), metrics = batches_of(made, 1, READ)
    assert sorted({key.ordinal for key in rows.keys}) == [2, 3]
    assert metrics["rollout/dropped_greedy_failed"].value == 6
    assert metrics["queue/dropped/greedy_failed"].value == 6
    assert metrics["reward/greedy"].count == 2

    async def clumsy(task: Task, llm: LLM, key: Key) -> Episode:
        if key.space == "train.greedy":
            raise ValueError("no tool for it")
        return await SingleTurn()(task, llm, key)

    with pytest.raises(RunError, match=r"4 of 4 groups .* \(4 greedy_failed\).*failed episodes: 4; the first: train\.greedy:\d"):
        batches_of(world(algorithm="remax", config=SMALL, agent=clumsy), 1, READ)


def test_a_companion_that_ran_out_of_tokens_is_judged_whatever_becomes_of_such_rows() -> None:
    async def cut_off(task: Task, llm: LLM, key: Key) -> Episode:
        episode = await SingleTurn()(task, llm, key)
        return replace(episode, stop="length") if key.space == "train.greedy" else episode

    config = replace(SMALL, stops=replace(SMALL.stops, length="drop"), shaping=ShapingConfig(stop_coef=-3.0))
    (rows,), _ = batches_of(world(algorithm="remax", config=config, agent=cut_off, reward=letter), 1, READ)
    assert len(rows) == 6
    assert set(rows["reward_baselines"].tolist()) == {-3.0}, "it is shaped as its rows are"


def test_a_resumed_group_gets_the_same_baseline(tmp_path: Path) -> None:
    """The process dies while the companion of group 1 is on its way; group 0 is in the queue."""

    async def scenario() -> None:
        gate = asyncio.Event()

        async def waiting(task: Task, llm: LLM, key: Key) -> Episode:
            if key.ordinal == 1 and key.space == "train.greedy":
                await gate.wait()
            return await SingleTurn()(task, llm, key)

        first = world(algorithm="remax", config=SMALL, agent=waiting, reward=letter)
        async with aclosing(aiter(first.source)) as batches:
            asking = asyncio.create_task(anext(batches))  # type: ignore[arg-type]
            while first.queue.metrics()["rows"].value < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await first.queue.save(tmp_path)
            state = first.source.state()
            assert state["running"] == [1]
            gate.set()
            undisturbed = await asking
            expected = await first.queue.get(undisturbed.keys, READ)

        second = world(algorithm="remax", config=SMALL, reward=letter)
        await second.queue.restore("s", tmp_path)
        second.source.restore(state)
        async with aclosing(aiter(second.source)) as batches:
            batch = await anext(batches)
            got = await second.queue.get(batch.keys, READ)
        assert got.keys == expected.keys
        for column in READ:
            assert got[column].equal(expected[column])
        assert {episode.key.ordinal for episode in second.reward.judged} == {1}

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------ parts of a reward


def parts(episode: Episode) -> RewardResult:
    text = episode.completion
    return RewardResult(text.count("a") / 2, {"length": 1.0, "a": float(text.count("a")), "b": float(text.count("b"))})


def test_components_are_a_column_in_the_declared_order() -> None:
    made = world(algorithm="gdpo", reward=parts, components=("b", "a"))
    (rows,), _ = batches_of(made, 1, frozenset({"reward_components", "tokens"}))
    assert rows["reward_components"].shape == (12, 2)
    by_key = {episode.key: episode.completion for episode in made.reward.judged}
    want = [[by_key[key].count("b"), by_key[key].count("a")] for key in rows.keys]
    assert torch.equal(rows["reward_components"], torch.tensor(want, dtype=torch.float32))


def test_a_reward_that_lacks_a_component_ends_the_run_and_names_it() -> None:
    made = world(algorithm="gdpo", reward=parts, components=("a", "format"))
    with pytest.raises(RewardError, match=r"lacks component 'format', which reward\.components names; it has length, a, b"):
        batches_of(made, 1, frozenset({"reward_components"}))


def test_a_failed_reward_needs_no_component() -> None:
    def flaky(episode: Episode) -> RewardResult:
        return RewardResult.failed("timeout") if episode.key.member == 0 else parts(episode)

    (rows,), _ = batches_of(world(algorithm="gdpo", reward=flaky, components=("a",)), 1, frozenset({"reward_components"}))
    assert {key.member for key in rows.keys} == {1, 2, 3}


def test_both_train_in_the_loop() -> None:
    for algorithm, components in (("remax", ()), ("gdpo", ("a", "length"))):
        made = world(algorithm=algorithm, reward=parts, components=components)
        run_world(made, 8)
        assert torch.softmax(made.engine.table, -1)[0] > 0.5, algorithm
        assert RolloutSource.costly & made.plan.reads
