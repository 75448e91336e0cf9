import asyncio

import pytest

from tandem.rewards.fake import FakeReward
from tandem.rewards.weighted import PartJournal, WeightedReward
from tandem.types import RewardResult
from tests.rewards.episodes import group, task


class Fixed:
    """Gives each episode this result."""

    def __init__(self, result: RewardResult) -> None:
        self._result, self.closed = result, 0

    async def __call__(self, task: object, group: tuple[object, ...]) -> list[RewardResult]:
        return [self._result] * len(group)

    async def close(self) -> None:
        self.closed += 1


def test_the_value_is_the_weighted_sum_and_each_part_is_a_component() -> None:
    style = Fixed(RewardResult(0.5, {"words": 3.0}, ((1, 0.25),)))
    reward = WeightedReward({"right": (FakeReward(), 2.0), "style": (style, -0.5), "seen": (Fixed(RewardResult(9.0)), 0.0)})
    first, second = asyncio.run(reward(task(), group("4", "5")))
    assert first == RewardResult(1.75, {"right": 1.0, "style": 0.5, "style/words": 3.0, "seen": 9.0}, ((1, -0.125),))
    assert (second.value, second.components["right"]) == (-0.25, 0.0)


def test_what_one_part_cannot_judge_is_failed_and_says_which() -> None:
    reward = WeightedReward({"right": (FakeReward(), 1.0), "style": (Fixed(RewardResult.failed("no idea")), 0.0)})
    (result,) = asyncio.run(reward(task(), group("4")))
    assert (result.value, result.reason, result.raised) == (None, "part 'style': no idea", False)
    raised = WeightedReward({"style": (Fixed(RewardResult.failed("KeyError", raised=True)), 1.0)})
    assert asyncio.run(raised(task(), group("4"))) == [RewardResult.failed("part 'style': KeyError", raised=True)]


def test_all_parts_are_closed() -> None:
    parts = [Fixed(RewardResult(1.0)), Fixed(RewardResult(1.0))]
    asyncio.run(WeightedReward({str(i): (part, 1.0) for i, part in enumerate(parts)}).close())
    assert [part.closed for part in parts] == [1, 1]


def test_parts_share_a_journal_without_meeting() -> None:
    entries: dict[str, RewardResult] = {}

    class Shared:
        get = staticmethod(entries.get)
        record = staticmethod(entries.update)

    a, b = PartJournal(Shared(), "a"), PartJournal(Shared(), "b")
    a.record({"train:7.0.0": RewardResult(1.0)})
    assert (a.get("train:7.0.0"), b.get("train:7.0.0")) == (RewardResult(1.0), None)
    assert list(entries) == ["train:7.0.0 a"]


@pytest.mark.parametrize("texts", [(), ("4",)])
def test_one_result_an_episode(texts: tuple[str, ...]) -> None:
    assert len(asyncio.run(WeightedReward({"a": (FakeReward(), 1.0)})(task(), group(*texts)))) == len(texts)
