"""What every Reward promises."""

import asyncio
import math
from collections.abc import Callable, Generator

import pytest
import torch

from tandem.data_proto import DataProto
from tandem.ports import Collect, Dispatch, Reward, register
from tandem.rewards.config import JudgeConfig, RewardConfig
from tandem.rewards.fake import FakeReward
from tandem.rewards.here import HereReward
from tandem.rewards.judge import JudgeReward
from tandem.rewards.model import ModelReward
from tandem.rewards.remote import RemoteReward
from tandem.rewards.weighted import WeightedReward
from tandem.rewards.workers import FunctionReward
from tandem.runtime.fake import FakeGroup
from tandem.types import Episode, RewardResult
from tests.rewards.episodes import group, task
from tests.rewards.judge import judging

Make = Callable[[str], Reward]
"""From the address of a judge."""

GRADED = "Is {reference} the same as {answer}?"

REWARDS: dict[str, Make] = {
    "fake": lambda _: FakeReward(),
    "function": lambda _: FunctionReward(RewardConfig(function="exact_match")),
    "here": lambda _: HereReward(RewardConfig(function="exact_match")),
    "remote": lambda url: RemoteReward(RewardConfig(url=url)),
    "model": lambda _: ModelReward(FakeGroup(LastToken(right=1.0))),
    "judge": lambda url: JudgeReward(RewardConfig(judge=JudgeConfig(url, "m", GRADED))),
    "weighted": lambda url: WeightedReward({"a": (FakeReward(), 0.5), "b": (RemoteReward(RewardConfig(url=url)), 0.5)}),
}
FAILING: dict[str, Make] = {
    "fake": lambda _: FakeReward(lambda _: None),
    "function": lambda _: FunctionReward(RewardConfig(function="tests.rewards.user_functions:reads")),
    "here": lambda _: HereReward(RewardConfig(function="tests.rewards.user_functions:reads")),
    "remote": lambda url: RemoteReward(RewardConfig(url=url, limit_s=0.2)),
    "model": lambda _: ModelReward(FakeGroup(LastToken(right=math.nan, wrong=math.inf))),
    "judge": lambda url: JudgeReward(RewardConfig(judge=JudgeConfig(url, "m", "{answer}"))),
    "weighted": lambda _: WeightedReward({"a": (FakeReward(), 0.5), "b": (FakeReward(lambda _: None), 0.5)}),
}


class LastToken:
    """A worker whose model likes rows that end with a 4."""

    def __init__(self, right: float, wrong: float = 0.0) -> None:
        self._right, self._wrong = right, wrong

    @register(Dispatch.SPLIT, Collect.CONCAT)
    async def score(self, rows: DataProto) -> DataProto:
        right_B = rows["tokens"][rows.lengths.cumsum(0) - 1] == ord("4")
        scores = torch.where(right_B, self._right, self._wrong).float()
        return DataProto.make(rows.keys, rows.lengths, row={"scores": scores})


@pytest.fixture(scope="module")
def url() -> Generator[str]:
    with judging() as judge:
        yield judge.url


def judged(make: Make, url: str, *groups: tuple[Episode, ...]) -> list[list[RewardResult]]:
    async def run() -> list[list[RewardResult]]:
        reward = make(url)
        results = await asyncio.gather(*(reward(task(), members) for members in groups))
        await reward.close()
        await reward.close()
        return [list(result) for result in results]

    return asyncio.run(run())


@pytest.mark.parametrize("make", REWARDS.values(), ids=REWARDS)
def test_one_result_an_episode_in_order(make: Make, url: str) -> None:
    groups = [group("4", "5", "4"), group("5"), group("4"), group("5", "4")]
    assert [[result.value for result in results] for results in judged(make, url, *groups)] == [[1, 0, 1], [0], [1], [0, 1]]


@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING)
def test_a_judgement_that_cannot_be_made_is_a_failure_with_a_reason(make: Make, url: str) -> None:
    (results,) = judged(make, url, group("raise", "4"))
    assert [result.ok for result in results] == [False, False]
    assert all(result.reason for result in results)


@pytest.mark.parametrize("make", REWARDS.values(), ids=REWARDS)
def test_it_can_be_closed_unused(make: Make, url: str) -> None:
    assert judged(make, url) == []
