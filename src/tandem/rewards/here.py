"""Rewards by a built-in function that is called where the loop runs: one that cannot hang or crash, whatever a policy writes.

`config.HERE` lists them. A group that goes to a worker and back takes twelve times as long (docs/adr/0036-rewards-judged-here.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.rewards.child import judge, load, results
from tandem.rewards.config import PartConfig, RewardConfig
from tandem.types import Episode, RewardResult, Task


class HereReward:
    """Implements the Reward port with `config.function`. Raises RewardError where that cannot be loaded, as a worker would."""

    def __init__(self, config: RewardConfig | PartConfig) -> None:
        assert config.function is not None
        self._name, self._function = config.function, load(config.function, config.params)

    async def start(self) -> None:
        """Nothing is to be started."""

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        return results(judge(self._function, self._name, task, group), len(group))

    async def close(self) -> None:
        """Nothing is to be ended."""
