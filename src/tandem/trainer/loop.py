"""The loop: for every mode, every objective and every runtime. What differs between them is in its arguments."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Protocol

from tandem.ports import CheckpointEngine, Learner, Source, Tracker
from tandem.trainer.plan import Plan
from tandem.types import Metrics, PolicyRef


class Hooks(Protocol):
    """What happens between steps: snapshots, evaluation, progress."""

    async def after_step(self, policy: PolicyRef, metrics: Metrics) -> None:
        """The weights are `policy`'s, the engines hold them, and in sync mode nothing is under way."""
        ...


async def train(
    source: Source,
    plan: Plan,
    learner: Learner,
    checkpoint: CheckpointEngine,
    tracker: Tracker,
    hooks: Hooks,
    *,
    steps: int,
) -> PolicyRef:
    """Trains until the policy's version is `steps`, and returns that policy; a resumed source goes on from its own."""
    policy = source.policy
    metrics = await checkpoint.publish(policy)  # fresh or restored, the engines start from the trainer's weights
    if policy.version >= steps:
        return policy
    clock = _Clock()
    async with aclosing(aiter(source)) as batches:
        async for batch in batches:  # BatchRef, leased from the queue
            clock.lap("rollout")
            async with source.training():  # colocated: pause and place engines; separate: nothing
                metrics += await plan.run(batch)  # stages write their columns to the queue
                clock.lap("plan")
                metrics += await learner.update(batch, policy)  # mini-batches and epochs inside
                clock.lap("update")
                policy = policy.next()
                metrics += await checkpoint.publish(policy)
                clock.lap("publish")
            metrics += await source.advance(policy)  # acknowledges the lease; the gate is the new policy's
            metrics += clock.metrics(sum(batch.lengths))
            tracker.log(measured(metrics), policy.version)
            await hooks.after_step(policy, metrics)  # snapshot and evaluation, when due
            if policy.version >= steps:
                break
            metrics, clock = Metrics(), _Clock()
    return policy


def measured(metrics: Metrics) -> Metrics:
    """Without the means of nothing: a number that was not measured is left out, and not logged as 0 or NaN."""
    return Metrics({name: metric for name, metric in metrics.items() if metric.reduction != "mean" or metric.count})


class _Clock:
    """Wall time of one step, by part."""

    def __init__(self) -> None:
        self._began_s = self._last_s = time.perf_counter()
        self._parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """What passed since the last lap belongs to `part`."""
        now_s = time.perf_counter()
        self._parts[f"time/{part}_s"] = now_s - self._last_s
        self._last_s = now_s

    def metrics(self, num_tokens: int) -> Metrics:
        step_s = time.perf_counter() - self._began_s
        return Metrics.sum({**self._parts, "time/step_s": step_s}) + Metrics.mean(
            {"time/tokens_per_s": num_tokens / step_s}, step_s
        )
