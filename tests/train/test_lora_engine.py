"""A training engine of a model with an adapter: what is trained, what the reference is, and what a snapshot holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.errors import ColumnError, ModelError
from tandem.models.adapters import LoraConfig
from tandem.models.decoder import Decoder, init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.models.hf import save_decoder
from tandem.models.lora import add_lora
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tests.train.rows import LORA, TINY, make_rows, tiny_decoder, tiny_lora

GRPO = loss_ref(configure("grpo", {"kl_coef": 0.1}))
CONFIG = TrainConfig(lr=0.05, micro_batch_tokens=16)
LOGPROBS, BOTH = frozenset({"logprobs"}), frozenset({"logprobs", "base_logprobs"})
ROWS = make_rows([7, 3, 5, 2, 6])


def init_lora(shape: DecoderConfig) -> Decoder:
    decoder = init_decoder(shape, 0)
    add_lora(decoder, LORA, 0)
    return decoder


def trained(engine: TorchEngine, steps: int = 3) -> TorchEngine:
    for seed in range(steps):
        engine.forward_backward(make_rows([7, 3, 5], seed), GRPO)
        engine.step()
    return engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_reference_is_the_base_at_step_0_and_ever_after(dtype: torch.dtype) -> None:
    base = TorchEngine(tiny_decoder(0, dtype), CONFIG).forward(ROWS, LOGPROBS)["logprobs"]
    engine = TorchEngine(tiny_lora(0, dtype, fresh=True), CONFIG)
    found = engine.forward(ROWS, BOTH)
    assert torch.equal(found["logprobs"], base)
    assert torch.equal(found["base_logprobs"], base)
    found = trained(engine).forward(ROWS, BOTH)
    assert torch.equal(found["base_logprobs"], base)
    assert not torch.equal(found["logprobs"], base)


def test_at_step_0_the_kl_to_the_reference_is_exactly_0() -> None:
    engine = TorchEngine(tiny_lora(fresh=True), CONFIG)
    found = engine.forward(ROWS, BOTH)
    batch = ROWS.with_columns(token={"old_logprobs": found["logprobs"], "ref_logprobs": found["base_logprobs"]})
    metrics = engine.forward_backward(batch, GRPO)[0].values_by_name()
    assert metrics["train/kl_ref"] == 0
    engine.step()
    assert engine.forward_backward(batch, GRPO)[0].values_by_name()["train/kl_ref"] > 0


def test_training_between_references_is_that_of_an_engine_which_gave_none() -> None:
    engine, other = (TorchEngine(tiny_lora(), CONFIG) for _ in range(2))
    for seed in range(2):
        for each in (engine, other):
            each.forward_backward(make_rows([7, 3, 5], seed), GRPO)
        engine.forward(ROWS, BOTH)  # with a gradient pending
        for each in (engine, other):
            each.step()
    for one, two in zip(engine.weight_shards(), other.weight_shards(), strict=True):
        assert torch.equal(one.tensor, two.tensor)


def test_frozen_weights_stay_and_are_not_given() -> None:
    decoder, base = tiny_lora(), dict(tiny_decoder().named_parameters())
    engine = trained(TorchEngine(decoder, CONFIG))
    frozen = {name: parameter for name, parameter in decoder.named_parameters() if "lora" not in name}
    assert len(frozen) == len(base)
    for name, parameter in frozen.items():
        assert parameter.grad is None
        assert torch.equal(parameter, base[name.replace(".base_layer.", ".")])
    given = {shard.name for shard in engine.weight_shards()}
    assert given == {spec.name for spec in engine.layout().specs}
    assert given.isdisjoint(frozen)
    assert given | frozen.keys() == set(dict(decoder.named_parameters()))


def test_only_a_model_with_an_adapter_can_switch_it_off() -> None:
    with pytest.raises(ColumnError, match="base_logprobs"):
        TorchEngine(tiny_decoder(), CONFIG).forward(ROWS, BOTH)


# ----------------------------------------------------------------------------------------------------------- on disk


def test_weights_of_a_directory_go_under_the_adapter_which_knows_them(tmp_path: Path) -> None:
    save_decoder(tiny_decoder(1), tmp_path)
    engine, adapter = TorchEngine(tiny_lora(0), CONFIG), {name: p.clone() for name, p in tiny_lora(0).named_parameters()}
    engine.load_weights(tmp_path)
    base = TorchEngine(tiny_decoder(1), CONFIG).forward(ROWS, LOGPROBS)["logprobs"]
    assert torch.equal(engine.forward(ROWS, BOTH)["base_logprobs"], base)
    for shard in engine.weight_shards():
        assert torch.equal(shard.tensor, adapter[shard.name])
    there = tiny_lora(1).adapter
    assert engine.decoder.adapter is not None
    assert there is not None
    assert engine.decoder.adapter.base == there.base
    with pytest.raises(ModelError, match="does not hold the tensors"):
        TorchEngine(init_lora(replace(TINY, num_layers=1)), CONFIG).load_weights(tmp_path)


def test_a_state_holds_the_adapter_and_not_the_model(tmp_path: Path) -> None:
    engine = trained(TorchEngine(tiny_lora(), CONFIG))
    engine.save(tmp_path / "state")
    assert load_file(tmp_path / "state/model/whole.safetensors").keys() == {shard.name for shard in engine.weight_shards()}
    again = TorchEngine(tiny_lora(fresh=True), CONFIG)
    again.load(tmp_path / "state")
    assert torch.equal(again.forward(ROWS, LOGPROBS)["logprobs"], engine.forward(ROWS, LOGPROBS)["logprobs"])


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    engine = trained(TorchEngine(tiny_lora(), CONFIG))
    engine.save(tmp_path / "adapter")
    TorchEngine(tiny_decoder(), CONFIG).save(tmp_path / "whole")
    before = engine.forward(ROWS, LOGPROBS)["logprobs"]
    with pytest.raises(ModelError, match=r"adapter of another model: .* fingerprint"):
        TorchEngine(tiny_lora(1), CONFIG).load(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"state of another model: \d+ weights differ, the first is .*lora_A"):
        TorchEngine(tiny_lora(config=LoraConfig(rank=LORA.rank + 1)), CONFIG).load(tmp_path / "adapter")
    with pytest.raises(ModelError, match="state of another model"):
        TorchEngine(tiny_decoder(), CONFIG).load(tmp_path / "adapter")
    with pytest.raises(ModelError, match="state of another model"):
        engine.load(tmp_path / "whole")
    assert torch.equal(engine.forward(ROWS, LOGPROBS)["logprobs"], before)
