"""Groups that outlived a process: what their source does not do again, and what it makes of those that are too old."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from tandem.data_proto import DataProto
from tandem.errors import StalenessError
from tandem.queue.durable import DurableQueue
from tandem.queue.memory import MemoryQueue
from tandem.trainer.intake import Intake
from tandem.trainer.schedule import schedule
from tandem.types import GroupKey, Key, Metrics, PolicyRef
from tests.trainer.world import World, world


async def first_step(made: World) -> tuple[tuple[Key, ...], torch.Tensor, Metrics, int]:
    """Keys and tokens of the batch, metrics of the step, and how many groups were judged for it."""
    async with aclosing(aiter(made.source)) as batches:
        batch = await anext(batches)
        tokens = (await made.queue.get(batch.keys, frozenset({"tokens"})))["tokens"]
        metrics = await made.source.advance(made.source.policy.next())
    return batch.keys, tokens, metrics, len(made.reward.judged)


def test_a_group_that_came_back_is_neither_sampled_nor_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.trainer.world.MemoryQueue", lambda config: DurableQueue(tmp_path, config))

    async def scenario() -> None:
        made = world()
        first = await first_step(made)
        await made.queue.close()
        assert first[3] > 0
        again = world()
        await again.queue.restore("", None, again.source.policy)
        second = await first_step(again)
        await again.queue.close()
        assert second[0] == first[0]
        assert torch.equal(second[1], first[1])
        assert second[3] == 0
        assert second[2]["reward/mean"] == first[2]["reward/mean"]
        assert second[2]["queue/offered_again"].value == len(second[0])
        assert [record["key"] for record in again.source.settled] == [str(key) for key in second[0]]

    asyncio.run(scenario())


def test_a_group_of_an_earlier_process_that_is_too_old_gives_its_slot_back() -> None:
    async def scenario(incarnation: int) -> None:
        queue, policy = MemoryQueue(), PolicyRef(incarnation=1, version=5)
        intake = Intake(queue, "train", 1, schedule("colocate_async", 1), policy)
        intake.open()
        for version in (3, 4):
            group, _ = await intake.admit(1)
            sampler = PolicyRef(incarnation=incarnation, version=version)
            tensors = {"tokens": torch.zeros(1), "mask": torch.ones(1)}
            await queue.put(DataProto.make([Key(*group)], [1], token=tensors, objects={"policy": [((sampler, 1),)]}))
        assert not intake.is_open
        lease = await intake.take()
        assert lease.ref.groups == (GroupKey("train", 1),)
        assert queue.metrics()["dropped/too_old"].value == 1
        assert intake.is_open

    asyncio.run(scenario(incarnation=0))
    with pytest.raises(StalenessError, match=r"train:0\.0\.0 was sampled by policy@1\.3"):
        asyncio.run(scenario(incarnation=1))
