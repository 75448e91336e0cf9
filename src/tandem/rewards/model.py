"""Rewards from a reward model: a whole episode's score, given by the workers that hold the model.

Groups are scored as they end, while others are still sampled. A score depends on its episode and on the model alone, as far as
the model's numerics keep that (law 9), so nothing is journalled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol, cast

from tandem.data_proto import DataProto
from tandem.ports import Collect, Dispatch, WorkerGroup, register
from tandem.types import Episode, Key, RewardResult, Sample, Task

_READ = frozenset({"tokens", "mask", "temperature"})


class ScoreWorker(Protocol):
    """A worker with one rank of a reward model."""

    @register(Dispatch.SPLIT, Collect.CONCAT)
    async def score(self, rows: DataProto) -> DataProto:
        """Row column `scores` (float32 [B]) of these rows: the value at each one's last masked token."""
        ...


class ModelReward:
    """Implements the Reward port over a group of ScoreWorkers. An episode's score is that of its last sample.

    Episodes that are waiting when the workers are free are scored in one call, whichever group they are of. The workers are their
    owner's to end. Belongs to one event loop.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._turn = asyncio.Lock()
        self._number = count()  # of rows: two calls may be about the same episode
        self._waiting: dict[Key, Sample] = {}
        self._scores: dict[Key, float] = {}  # of those that are scored and not fetched

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        del task
        keys = [Key("score", next(self._number)) for _ in group]
        samples = {key: replace(episode.samples[-1], key=key) for key, episode in zip(keys, group, strict=True)}
        self._waiting |= samples
        try:
            async with self._turn:
                await asyncio.sleep(0)  # groups that ended in the same step of an engine come before this goes on
                if samples.keys() & self._waiting.keys():
                    await self._score()
            return [_result(self._scores[key], sample) for key, sample in samples.items()]
        finally:
            for key in samples:
                self._waiting.pop(key, None)
                self._scores.pop(key, None)

    async def close(self) -> None:
        """Nothing: see the class."""

    async def _score(self) -> None:
        """All that are waiting now; those that nobody waits for any more when the scores come are left out."""
        rows = DataProto.from_samples(list(self._waiting.values())).only(_READ)
        found = await self._workers.call(ScoreWorker.score, rows)
        scores = zip(found.keys, cast("list[float]", found["scores"].tolist()), strict=True)
        self._scores |= {key: score for key, score in scores if self._waiting.pop(key, None) is not None}


def _result(score: float, sample: Sample) -> RewardResult:
    if not sample.mask.any():
        return RewardResult.failed("the policy wrote no token that the reward model could score")
    return RewardResult(score) if math.isfinite(score) else RewardResult.failed(f"the reward model's score is {score}")
