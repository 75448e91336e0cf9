"""The contract of ports.Source, for rollouts, datasets and the fake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from tandem.data.fake import FakeDataset
from tandem.errors import RunError
from tandem.ports import Source, TransferQueue
from tandem.queue.fake import FakeQueue
from tandem.text.fake import FakeRenderer
from tandem.trainer.dataset import Comparisons, DatasetSource, Demonstrations
from tandem.trainer.fake import FakeSource
from tandem.types import BatchRef, Key, Message, PolicyRef, Task
from tests.trainer.world import world

Publish = Callable[[PolicyRef], None]
Made = tuple[Source, TransferQueue, Publish]


def rollouts() -> Made:
    made = world()
    return made.source, made.queue, lambda policy: setattr(made.rollout, "policy", policy)


def demonstrations() -> Made:
    tasks = [Task(str(i), (Message("user", str(i)), Message("assistant", str(i) * (i + 1)))) for i in range(5)]
    queue = FakeQueue()
    maker = Demonstrations(FakeRenderer(), max_context=64)
    made = DatasetSource(dataset=FakeDataset(tasks), maker=maker, queue=queue, tasks_per_step=2, seed=3, policy=PolicyRef())
    return made, queue, lambda _: None


def pairs() -> Made:
    sides = [(Message("assistant", "yes"),), (Message("assistant", "no"),)]
    tasks = [Task(str(i), (Message("user", str(i)),), chosen=sides[0], rejected=sides[1]) for i in range(5)]
    queue, maker = FakeQueue(), Comparisons(FakeRenderer(), max_context=64)
    made = DatasetSource(dataset=FakeDataset(tasks), maker=maker, queue=queue, tasks_per_step=2, seed=3, policy=PolicyRef())
    return made, queue, lambda _: None


SOURCES: dict[str, Callable[[], Made]] = {
    "rollouts": rollouts,
    "demonstrations": demonstrations,
    "pairs": pairs,
    "fake": lambda: (FakeSource(), FakeQueue(), lambda _: None),
}


@pytest.fixture(params=SOURCES, name="make")
def _make(request: pytest.FixtureRequest) -> Callable[[], Made]:
    return SOURCES[request.param]


async def steps(source: Source, publish: Publish, n: int) -> list[BatchRef]:
    """The next `n` batches, each trained on."""
    out: list[BatchRef] = []
    publish(source.policy)
    async with aclosing(aiter(source)) as batches:
        async for batch in batches:
            out.append(batch)
            async with source.training():
                publish(source.policy.next())
            await source.advance(source.policy.next())
            if len(out) == n:
                return out
    raise AssertionError("a source has no end")


def keys(batches: list[BatchRef]) -> list[Key]:
    return [key for batch in batches for key in batch.keys]


def test_each_row_comes_once_and_the_policy_is_the_one_it_was_advanced_to(make: Callable[[], Made]) -> None:
    async def scenario() -> None:
        source, _, publish = make()
        given = keys(await steps(source, publish, 3))
        assert len(set(given)) == len(given) > 0
        assert given == sorted(given)
        assert source.policy == PolicyRef(version=3)
        more = keys(await steps(source, publish, 1))
        assert not set(more) & set(given)

    asyncio.run(scenario())


def test_batches_are_given_back_one_by_one(make: Callable[[], Made]) -> None:
    async def scenario() -> None:
        source, _, _ = make()
        with pytest.raises(RunError, match="without a batch"):
            await source.advance(PolicyRef(version=1))
        async with aclosing(aiter(source)) as batches:
            await anext(batches)
            with pytest.raises(RunError, match="before advance"):
                await anext(batches)

    asyncio.run(scenario())


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_resumed_source_gives_what_an_undisturbed_one_would(make: Callable[[], Made], tmp_path: Path, before: int) -> None:
    async def scenario() -> None:
        undisturbed, _, publish = make()
        expected = keys(await steps(undisturbed, publish, 4))

        first, queue, publish = make()
        done = await steps(first, publish, before) if before else []
        await queue.save(tmp_path)
        state = json.loads(json.dumps(first.state()))

        second, restored, publish = make()
        await restored.restore("s", tmp_path)
        second.restore(state)
        assert second.policy == PolicyRef(incarnation=1, version=before)
        assert keys(done) + keys(await steps(second, publish, 4 - before)) == expected

    asyncio.run(scenario())


def test_a_batch_that_was_out_when_the_snapshot_was_taken_comes_again(make: Callable[[], Made], tmp_path: Path) -> None:
    async def scenario() -> None:
        first, queue, _ = make()
        async with aclosing(aiter(first)) as batches:
            out = await anext(batches)
            await queue.save(tmp_path)
            state = json.loads(json.dumps(first.state()))
        second, restored, publish = make()
        await restored.restore("s", tmp_path)
        second.restore(state)
        assert (await steps(second, publish, 1))[0].keys == out.keys

    asyncio.run(scenario())
