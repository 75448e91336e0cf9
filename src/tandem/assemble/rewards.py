"""From a recipe's section `reward` to the reward."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from tandem.ports import Reward
from tandem.rewards.config import HERE, PartConfig, RewardConfig
from tandem.rewards.here import HereReward
from tandem.rewards.judge import JudgeReward
from tandem.rewards.remote import RemoteReward
from tandem.rewards.replay import Journal
from tandem.rewards.weighted import PartJournal, WeightedReward
from tandem.rewards.workers import FunctionReward

_Reward = FunctionReward | HereReward | JudgeReward | RemoteReward


@asynccontextmanager
async def open_reward(config: RewardConfig, journal: Journal | None = None, *, start: bool = True) -> AsyncGenerator[Reward]:
    """start: tries each of its parts first. Raises RewardError for one that cannot be used; ends all of them."""
    async with AsyncExitStack() as stack:
        parts: dict[str, PartConfig | RewardConfig] = {**config.parts} or {"": config}
        rewards: dict[str, _Reward] = {}
        for name, part in parts.items():
            reward = _one(part, PartJournal(journal, name) if journal is not None and name else journal)
            stack.push_async_callback(reward.close)
            rewards[name] = reward
            if start:
                await reward.start()
        if not config.parts:
            yield rewards[""]
        else:
            yield WeightedReward({name: (rewards[name], part.weight) for name, part in config.parts.items()})


def _one(config: RewardConfig | PartConfig, journal: Journal | None) -> _Reward:
    if config.function in HERE:
        return HereReward(config)
    if config.url is not None:
        return RemoteReward(config, journal)
    return JudgeReward(config, journal) if config.judge is not None else FunctionReward(config, journal)
