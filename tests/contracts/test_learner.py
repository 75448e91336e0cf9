"""The contract of ports.Learner, for the policy's learner and the fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from tandem.ports import Learner, Source
from tandem.trainer.fake import FakeLearner, FakeSource
from tandem.trainer.plan import Plan
from tandem.types import Metrics, PolicyRef
from tests.trainer.world import world


def policy() -> tuple[Source, Plan, Learner]:
    made = world()
    return made.source, made.plan, made.learner


Make = Callable[[], tuple[Source, Plan, Learner]]
LEARNERS: dict[str, Make] = {"policy": policy, "fake": lambda: (FakeSource(), Plan(()), FakeLearner())}


@pytest.mark.parametrize("make", LEARNERS.values(), ids=LEARNERS)
def test_a_learner_trains_on_a_handle_and_returns_named_metrics(make: Make) -> None:
    source, plan, learner = make()

    async def scenario() -> Metrics:
        async with aclosing(aiter(source)) as batches:
            batch = await anext(batches)
            await plan.run(batch)
            return await learner.update(batch, PolicyRef())

    metrics = asyncio.run(scenario())
    assert "train/loss" in metrics
    assert all(name.startswith("train/") for name in metrics)
