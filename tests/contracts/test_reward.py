"""What every Reward promises."""

import asyncio
from collections.abc import Callable

import pytest

from tandem.ports import Reward
from tandem.rewards.fake import FakeReward
from tandem.rewards.workers import FunctionReward, RewardConfig
from tandem.types import Episode, RewardResult
from tests.rewards.episodes import group, task

REWARDS: dict[str, Callable[[], Reward]] = {
    "fake": FakeReward,
    "function": lambda: FunctionReward(RewardConfig("exact_match")),
}
FAILING: dict[str, Callable[[], Reward]] = {
    "fake": lambda: FakeReward(lambda _: None),
    "function": lambda: FunctionReward(RewardConfig("tests.rewards.user_functions:reads")),
}


def judged(make: Callable[[], Reward], *groups: tuple[Episode, ...]) -> list[list[RewardResult]]:
    async def run() -> list[list[RewardResult]]:
        reward = make()
        results = await asyncio.gather(*(reward(task(), members) for members in groups))
        await reward.close()
        await reward.close()
        return [list(result) for result in results]

    return asyncio.run(run())


@pytest.mark.parametrize("make", REWARDS.values(), ids=REWARDS)
def test_one_result_an_episode_in_order(make: Callable[[], Reward]) -> None:
    groups = [group("4", "5", "4"), group("5"), group("4"), group("5", "4")]
    assert [[result.value for result in results] for results in judged(make, *groups)] == [[1, 0, 1], [0], [1], [0, 1]]


@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING)
def test_a_judgement_that_cannot_be_made_is_a_failure_with_a_reason(make: Callable[[], Reward]) -> None:
    (results,) = judged(make, group("raise", "4"))
    assert [result.ok for result in results] == [False, False]
    assert all(result.reason for result in results)


@pytest.mark.parametrize("make", REWARDS.values(), ids=REWARDS)
def test_it_can_be_closed_unused(make: Callable[[], Reward]) -> None:
    assert judged(make) == []
