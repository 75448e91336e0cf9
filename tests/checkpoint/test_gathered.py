"""What only copies can go wrong in: several ranks' parts, copies of a model, and what comes damaged."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from tandem.checkpoint.fake import FakeWeightWorker
from tandem.checkpoint.gathered import gather
from tandem.errors import EngineError
from tandem.runtime.inline import InlineGroup
from tandem.weights import WeightLayout, WeightPart, wire_hash
from tests.contracts.test_checkpoint_engine import some_weights


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
    assert wire_hash(found.shards()) == wire_hash(first.weight_shards())
    assert [shard.name for shard in found.shards()] == ["embed", "norm", "scale", "row"]


def test_what_comes_damaged_is_refused() -> None:
    group = InlineGroup([Damaged(some_weights(), copies=True)])
    with pytest.raises(EngineError, match=r"the weights of rank 0 have hash .* they came damaged"):
        asyncio.run(gather(group))
