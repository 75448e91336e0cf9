from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.checkpoint.fake import FakeWeightWorker
from tandem.checkpoint.in_place import InPlace
from tandem.errors import EngineError
from tandem.runtime.inline import InlineGroup
from tandem.types import PolicyRef
from tandem.weights import WeightShard
from tests.contracts.test_checkpoint_engine import Rollout, publisher, some_weights, update, zeros


class Cut(FakeWeightWorker):
    def weight_shards(self) -> Iterator[WeightShard]:
        for shard in super().weight_shards():
            yield replace(shard, tensor=shard.tensor[:1] if shard.tensor.ndim else shard.tensor)


def test_weights_that_are_not_whole_are_refused() -> None:
    with pytest.raises(
        EngineError, match=r"weight embed is cut: a block \(1, 3\) of \(20, 3\); publishing in place needs whole weights"
    ):
        asyncio.run(publisher(InPlace()).connect(InlineGroup([Cut(some_weights())]), []))


@pytest.mark.parametrize(
    ("deaf", "message"),
    [
        (True, r"no rollout engine holds policy@0\.1: engine 0: it says policy@0\.0 after policy@0\.1 was published to it"),
        (False, r"engine 0: the weights of rank 0 have hash \w+ there and \w+ in the engine"),
    ],
    ids=["deaf", "not-the-same-storage"],
)
def test_an_engine_that_did_not_listen_or_reads_something_else_is_an_error(deaf: bool, message: str) -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights())
        engine = publisher(InPlace())
        await engine.connect(InlineGroup([trainer]), [Rollout(trainer.held if deaf else zeros(trainer), deaf=deaf)])
        await engine.publish(PolicyRef(version=1))

    with pytest.raises(EngineError, match=message):
        asyncio.run(scenario())


def test_says_whether_anything_changed() -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights())
        engine = publisher(InPlace())
        await engine.connect(InlineGroup([trainer]), [])
        assert "publish/changed" not in await engine.publish(PolicyRef(version=1))
        assert (await engine.publish(PolicyRef(version=2)))["publish/changed"].value == 0
        update(trainer)
        assert (await engine.publish(PolicyRef(version=3)))["publish/changed"].value == 1

    asyncio.run(scenario())
