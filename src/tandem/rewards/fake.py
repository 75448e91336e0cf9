"""A reward without processes: a rule applied to one episode at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.types import Episode, RewardResult, Task


def _right(episode: Episode) -> float:
    return float(episode.completion == str(episode.task.answer))


class FakeReward:
    """Implements the Reward port; `closed` counts calls of `close`.

    rule: the value of an episode, or None where its judgement fails; without one, the answer is compared.
    """

    def __init__(self, rule: Callable[[Episode], float | None] = _right) -> None:
        self._rule = rule
        self.closed = 0

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        values = [self._rule(episode) for episode in group]
        return [RewardResult.failed("the rule gave none") if value is None else RewardResult(value) for value in values]

    async def close(self) -> None:
        self.closed += 1
