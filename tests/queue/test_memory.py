"""MemoryQueue: what it adds to the contract, waiting and its limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tandem.data_proto import DataProto
from tandem.errors import QueueError, StalledError
from tandem.ports import Consumer
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.types import GroupKey, Key

LEARNER = Consumer("learner")
TOKENS = frozenset({"tokens"})


def row(ordinal: int, member: int = 0) -> DataProto:
    return DataProto.make([Key("train", ordinal, member)], [1], token={"tokens": torch.zeros(1)})


def test_takers_and_reservers_wake_when_something_moves() -> None:
    async def scenario() -> None:
        queue = MemoryQueue(QueueConfig(max_groups=1, stall_limit_s=5))
        taking = asyncio.create_task(queue.take(LEARNER, TOKENS, 1))
        await queue.reserve(GroupKey("train", 0), 1)
        reserving = asyncio.create_task(queue.reserve(GroupKey("train", 1), 1))
        await asyncio.sleep(0)
        assert not taking.done()
        await queue.put(row(0))
        lease = await taking
        assert not reserving.done()
        await queue.ack(lease)
        await reserving

    asyncio.run(scenario())


def test_a_full_queue_stalls_by_name_and_progress_postpones_the_limit() -> None:
    async def scenario() -> None:
        queue = MemoryQueue(QueueConfig(max_groups=1, stall_limit_s=0.1))
        taking = asyncio.create_task(queue.take(LEARNER, TOKENS, 1))
        await queue.reserve(GroupKey("train", 0), 4)
        for member in range(4):  # slower in all than the limit, but always moving
            await asyncio.sleep(0.05)
            await queue.put(row(0, member))
        assert len((await taking).ref.keys) == 4
        with pytest.raises(StalledError, match=r"train:1.*max_groups 1"):
            await queue.reserve(GroupKey("train", 1), 1)
        with pytest.raises(QueueError, match="holds 1"):
            await queue.take(LEARNER, TOKENS, 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("bad", [{"max_groups": 0}, {"stall_limit_s": -1.0}])
def test_config_says_what_is_wrong(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        QueueConfig(**bad)
