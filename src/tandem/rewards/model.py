"""Rewards from a reward model: a whole episode's score, given by the workers that hold the model.

Groups are scored as they end, while others are still sampled. A score depends on its episode and on the model alone, as far as
the model's numerics keep that (law 9), so nothing is journalled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
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
        self._free = asyncio.Lock()
        self._waiting: list[Sample] = []
        self._calls: list[asyncio.Task[list[float]]] = []  # the last one takes who is waiting, unless it has begun

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        del task
        if not self._waiting:
            self._calls.append(asyncio.create_task(self._score(), name="reward model"))
        call, first = self._calls[-1], len(self._waiting)
        samples = [episode.samples[-1] for episode in group]
        self._waiting += samples
        scores = await asyncio.shield(call)  # others wait for it too
        return [_result(score, sample) for score, sample in zip(scores[first:], samples, strict=False)]

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _score(self) -> list[float]:
        """Of all that are waiting when the workers are free, in order."""
        async with self._free:
            samples, self._waiting = self._waiting, []
            self._calls = self._calls[-1:]
            numbered = [replace(sample, key=Key("score", i)) for i, sample in enumerate(samples)]  # an episode may come twice
            found = await self._workers.call(ScoreWorker.score, DataProto.from_samples(numbered).only(_READ))
            return cast("list[float]", found["scores"].tolist())


def _result(score: float, sample: Sample) -> RewardResult:
    if not sample.mask.any():
        return RewardResult.failed("the policy wrote no token that the reward model could score")
    return RewardResult(score) if math.isfinite(score) else RewardResult.failed(f"the reward model's score is {score}")
