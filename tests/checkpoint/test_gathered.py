"""What only copies can go wrong in: several ranks' parts, copies of a model, and what comes damaged."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from tandem.checkpoint.fake import FakeWeightWorker
from tandem.checkpoint.gathered import Gathered, gather
from tandem.checkpoint.wire import wire_hash
from tandem.errors import EngineError
from tandem.runtime.inline import InlineGroup
from tandem.types import PolicyRef
from tandem.weights import WeightLayout, WeightPart
from tests.contracts.test_checkpoint_engine import Rollout, some_weights


class OfReplica(FakeWeightWorker):
    """A rank of the second copy of the model."""

    async def weights(self) -> WeightPart:
        part = await super().weights()
        return replace(part, layout=WeightLayout(part.layout.specs, replicas=2, replica=1))


class Damaged(FakeWeightWorker):
    """One bit of what it sends arrives otherwise."""

    async def weights(self) -> WeightPart:
        part = await super().weights()
        part.shards[0].tensor.view(torch.int32)[0, 1] ^= 1
        return part


def test_the_first_copy_of_the_model_is_taken_and_no_other() -> None:
    first, second = FakeWeightWorker(some_weights(), copies=True), OfReplica({"embed": torch.zeros(3, 2)}, copies=True)
    found = asyncio.run(gather(InlineGroup([first, second])))
    assert found.wire_hashes == (wire_hash(first.shards()),)
    assert [shard.name for shard in found.shards()] == ["embed", "norm", "scale"]


def test_what_comes_damaged_is_refused() -> None:
    group = InlineGroup([Damaged(some_weights(), copies=True)])
    with pytest.raises(EngineError, match=r"the weights of rank 0 have hash .* they came damaged"):
        asyncio.run(gather(group))


def test_without_engines_nothing_is_gathered_and_an_engine_that_did_not_listen_is_an_error() -> None:
    async def scenario() -> None:
        group, engine = InlineGroup([Damaged(some_weights(), copies=True)]), Gathered()
        await engine.connect(group, [])
        assert (await engine.publish(PolicyRef(version=1)))["publish/bytes"].value == 0
        await engine.connect(InlineGroup([FakeWeightWorker(some_weights())]), [Rollout({}, deaf=True)])
        with pytest.raises(EngineError, match=r"says policy@0\.0 after policy@0\.2 was published to it"):
            await engine.publish(PolicyRef(version=2))

    asyncio.run(scenario())
