"""Shaping: what is credited for how long an answer is and how it stopped, and where in the life of a group."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from tandem.agents.single_turn import SingleTurn
from tandem.data_proto import DataProto
from tandem.ports import LLM
from tandem.trainer.shaping import ShapingConfig, shaped, shaping_metrics
from tandem.trainer.source import RolloutConfig
from tandem.types import Episode, Key, RewardResult, Task
from tests.trainer.test_rows import episode
from tests.trainer.world import World, world


def value(judged: Episode) -> float | None:
    assert judged.reward is not None
    return judged.reward.value


def credited(judged: list[Episode], max_tokens: int = 4, **config: Any) -> list[float | None]:
    return [value(each) for each in shaped(judged, ShapingConfig(**config), max_tokens=max_tokens)]


def test_the_penalty_grows_over_the_buffer_and_counts_the_longest_sample() -> None:
    judged = [episode(0, reward=1.0), episode(1, reward=0.0, samples=2)]  # each sample has two sampled tokens
    assert credited(judged, max_tokens=4, overlong_buffer_tokens=4) == [0.5, -0.5]
    assert credited(judged, max_tokens=3, overlong_buffer_tokens=2, overlong_penalty=0.5) == [0.75, -0.25]
    assert credited(judged, max_tokens=4, overlong_buffer_tokens=2) == [1.0, 0.0]
    assert credited(judged) == [1.0, 0.0]


def test_an_answer_that_was_cut_off_earns_a_share_or_a_fixed_amount_less_the_penalty() -> None:
    judged = [episode(0, reward=1.0), episode(1, reward=1.0, stop="length"), episode(2, reward=1.0, stop="tool_limit")]
    assert credited(judged, stop_coef=0.25) == [1.0, 0.25, 1.0]
    assert credited(judged, stop_coef=-0.5) == [1.0, -0.5, 1.0]
    assert credited(judged, max_tokens=2, stop_coef=0.25, overlong_buffer_tokens=2) == [0.0, -0.75, 0.0]


def test_nothing_else_of_a_reward_changes_and_metrics_say_how_many_did() -> None:
    judged = [replace(episode(0), reward=RewardResult(1.0, {"format": 0.5})), episode(1, reward=1.0, stop="length")]
    after = shaped(judged, ShapingConfig(stop_coef=0.5), max_tokens=4)
    assert after[0] == judged[0]
    metrics = shaping_metrics(judged, after)
    assert (metrics["reward/shaped"].value, metrics["reward/shaped"].count) == (0.75, 2)
    assert metrics["reward/shaped_frac"].value == 0.5


@pytest.mark.parametrize("bad", [{"overlong_buffer_tokens": -1}, {"overlong_penalty": 0.0}, {"stop_coef": 1.0}])
def test_config_says_what_is_wrong(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ShapingConfig(**bad)


async def cut_off(task: Task, llm: LLM, key: Key) -> Episode:
    """Odd members run out of tokens."""
    made = await SingleTurn()(task, llm, key)
    return replace(made, stop="length") if key.member % 2 else made


def rows(made: World) -> DataProto:
    async def scenario() -> DataProto:
        async with aclosing(aiter(made.source)) as batches:
            batch = await anext(batches)
            return await made.queue.get(batch.keys, frozenset({"rewards", "stop"}))

    return asyncio.run(scenario())


def test_the_filter_sees_what_was_judged_and_the_group_s_statistics_what_is_credited() -> None:
    """Answers that are all right say nothing about the task, however they differ in length."""

    def right(judged: Episode) -> float:
        return 1.0 if judged.key.ordinal < 3 else float(judged.key.member < 2)

    config = RolloutConfig(groups_per_step=2, group_size=4, shaping=ShapingConfig(stop_coef=0.5))
    made = world(algorithm="dapo", agent=cut_off, reward=right, config=config)
    found = rows(made)
    assert sorted({key.ordinal for key in found.keys}) == [3, 4]
    assert found["rewards"].tolist() == [1.0, 0.5, 0.0, 0.0] * 2
