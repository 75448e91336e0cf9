"""Copying shards into a module: as a whole or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tandem.checkpoint.gathered import GatheredWeights
from tandem.errors import EngineError
from tandem.models.adapters import LoraConfig
from tandem.models.lora import add_lora
from tandem.rollout.weights import load
from tandem.weights import WeightShard, whole_shards
from tests.rollout.tiny import decoder


def module() -> nn.Module:
    made = nn.Linear(3, 4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    return made


WEIGHT, BIAS = torch.arange(12.0).view(4, 3), torch.arange(4.0)


def test_of_a_model_with_an_adapter_the_adapter_moves_and_all_of_it() -> None:
    target, source = (decoder(seed=seed) for seed in (0, 1))
    for seed, model in enumerate((target, source)):
        add_lora(model, LoraConfig(rank=2), seed)
    assert source.adapter is not None
    frozen = {name: weight.clone() for name, weight in target.own_parameters().items()}
    moved = [shard for shard in whole_shards(source) if shard.name in source.adapter.names]
    load(target, GatheredWeights(tuple(moved)))
    parameters = dict(target.named_parameters())
    assert all(torch.equal(parameters[shard.name], shard.tensor) for shard in moved)
    assert all(torch.equal(weight, frozen[name]) for name, weight in target.own_parameters().items())
    with pytest.raises(EngineError, match="not given as a whole"):
        load(target, GatheredWeights(tuple(moved[1:])))
    with pytest.raises(EngineError, match="embed_tokens"):
        load(target, GatheredWeights(tuple(whole_shards(source))))


def test_blocks_of_any_cut_and_dtype() -> None:
    target = module()
    load(
        target,
        GatheredWeights(
            (
                WeightShard("weight", (4, 3), (2, 0), WEIGHT[2:]),
                WeightShard("bias", (4,), (0,), BIAS.bfloat16()),
                WeightShard("weight", (4, 3), (0, 1), WEIGHT[:2, 1:]),
                WeightShard("weight", (4, 3), (0, 0), WEIGHT[:2, :1]),
            )
        ),
    )
    state = target.state_dict()
    assert torch.equal(state["weight"], WEIGHT)
    assert torch.equal(state["bias"], BIAS)
    assert state["bias"].dtype == torch.float32


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (WeightShard("scale", (4,), (0,), BIAS), r"'scale' is not one of this engine's model; it has \['bias', 'weight'\]"),
        (WeightShard("bias", (5,), (0,), BIAS), r"shape \[5\], the engine's has \[4\]"),
        (WeightShard("bias", (4,), (1,), BIAS), r"from \[1\] to \[5\] leaves \[4\]"),
        (WeightShard("bias", (4,), (-1,), BIAS[:2]), r"from \[-1\]"),
        (WeightShard("bias", (4,), (0,), BIAS[:3]), "'bias': 3 of 4 numbers"),
    ],
)
def test_what_does_not_fit_changes_nothing(bad: WeightShard, says: str) -> None:
    target = module()
    with pytest.raises(EngineError, match=says):
        load(target, GatheredWeights((WeightShard("weight", (4, 3), (0, 0), WEIGHT), bad)))
    assert not any(parameter.any() for parameter in target.parameters())
