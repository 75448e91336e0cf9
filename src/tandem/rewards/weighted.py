"""Several rewards as one: each judges, their weighted sum is what is trained on, and each is a component that is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.ports import Reward
from tandem.rewards.replay import Journal
from tandem.types import Episode, RewardResult, Task


class WeightedReward:
    """Implements the Reward port. parts: by name, a reward and its weight; they judge at the same time.

    An episode that one part could not judge is failed, with the part's name in the reason. A part's own components are named
    PART/NAME.
    """

    def __init__(self, parts: Mapping[str, tuple[Reward, float]]) -> None:
        assert parts
        self._parts = dict(parts)

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        found = await asyncio.gather(*(reward(task, group) for reward, _ in self._parts.values()))
        return [self._sum(results) for results in zip(*found, strict=True)]

    async def close(self) -> None:
        for reward, _ in self._parts.values():
            await reward.close()

    def _sum(self, results: Sequence[RewardResult]) -> RewardResult:
        total, components = 0.0, dict[str, float]()
        for (name, (_, weight)), result in zip(self._parts.items(), results, strict=True):
            if result.value is None:
                return RewardResult.failed(f"part {name!r}: {result.reason}", raised=result.raised)
            total += weight * result.value
            components |= {name: result.value} | {f"{name}/{part}": value for part, value in result.components.items()}
        tokens = tuple(
            (position, weight * value)
            for (_, weight), result in zip(self._parts.values(), results, strict=True)
            for position, value in result.token_rewards
        )
        return RewardResult(total, components, tokens)


@dataclass(frozen=True, slots=True)
class PartJournal:
    """What one part of a reward writes into the journal that all share."""

    journal: Journal
    part: str

    def get(self, key: str) -> RewardResult | None:
        return self.journal.get(f"{key} {self.part}")

    def record(self, results: Mapping[str, RewardResult]) -> None:
        self.journal.record({f"{key} {self.part}": result for key, result in results.items()})
