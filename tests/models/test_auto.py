"""Models of transformers behind the same interface: their own numbers, their own names, and what cannot be trained is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.errors import ConfigError, EngineError, ModelError
from tandem.models.adapters import LoraConfig
from tandem.models.auto import AutoDecoder, load_auto, save_auto
from tandem.models.heads import row_logprobs
from tandem.models.lora import add_lora
from tests.train.rows import VOCAB, tiny_auto

KINDS = ["gpt2", "gpt_neox"]
LENGTHS = torch.tensor([9, 5, 2])
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def rows(seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(seed))


def mask() -> Tensor:
    return (torch.arange(9) < LENGTHS[:, None]) & (torch.arange(9) > 0)


def logprobs(model: AutoDecoder, tokens: Tensor | None = None) -> Tensor:
    return row_logprobs(model, rows() if tokens is None else tokens, LENGTHS, mask(), torch.ones(3))[0].detach()


def fresh(kind: str, **fields: Any) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **fields))


def adapted(kind: str, lora: LoraConfig | None = None) -> AutoDecoder:
    model = tiny_auto(kind)
    add_lora(model, lora or LoraConfig(rank=3, alpha=6.0), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


# ----------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_transformers_row_by_row(kind: str) -> None:
    model, tokens = tiny_auto(kind), rows()
    got = logprobs(model)
    for row, length in enumerate(LENGTHS.tolist()):
        with torch.no_grad():
            logits = model.whole(tokens[row : row + 1, :length]).logits[0]
        want = logits[:-1].log_softmax(-1).gather(1, tokens[row, 1:length, None])[:, 0]
        torch.testing.assert_close(got[row, 1:length], want, rtol=0, atol=1e-5)
    assert bool((got[~mask()] == 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_padding_is_inert(kind: str) -> None:
    model, other = tiny_auto(kind), torch.where(torch.arange(9) < LENGTHS[:, None], rows(), rows(1))
    torch.testing.assert_close(logprobs(model, other), logprobs(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_have_their_hugging_face_names(kind: str) -> None:
    model = tiny_auto(kind)
    assert list(dict(model.named_parameters())) == list(dict(model.whole.named_parameters()))
    assert model.tied == ({"lm_head.weight": "transformer.wte.weight"} if kind == "gpt2" else {})


def test_bfloat16_is_for_products_alone() -> None:
    model = tiny_auto("gpt_neox", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    computed: list[torch.dtype] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, out: computed.append(out.dtype))
    assert model.prefill(rows()).dtype == model.output_weight.dtype == torch.bfloat16
    assert computed == [torch.bfloat16] * 8
    gap = (logprobs(model) - logprobs(tiny_auto("gpt_neox"))).abs().max()
    assert 0 < gap < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_computed_again_to_the_same_gradient(kind: str) -> None:
    found: list[dict[str, Tensor]] = []
    calls: list[int] = []
    for recompute in (False, True):
        model = tiny_auto(kind)
        model.recompute = recompute
        kinds = {type(layer) for layer in model.layers}
        (layer,) = kinds
        forward: Callable[..., Any] = layer.forward
        with patch.object(layer, "forward", autospec=True, side_effect=forward) as called:
            model.prefill(rows()).square().sum().backward()
        calls.append(called.call_count)
        found.append({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})
    assert calls == [2, 4]
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name


def test_copies_are_models_of_their_own() -> None:
    model = adapted("gpt2")
    want = logprobs(model)
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.zero_()
        assert not torch.equal(logprobs(copy), want)
        assert torch.equal(logprobs(model), want)


# ---------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_nothing_at_first_and_when_switched_off(kind: str) -> None:
    want = logprobs(tiny_auto(kind))
    fresh = tiny_auto(kind)
    add_lora(fresh, LoraConfig(rank=3), 0)
    assert torch.equal(logprobs(fresh), want)
    model = adapted(kind)
    assert model.adapter is not None
    changed = logprobs(model)
    assert (changed - want).abs().max() > 0.05
    with model.adapter.switched_off():
        assert torch.equal(logprobs(model), want)
    assert torch.equal(logprobs(model), changed)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == model.adapter.names


def test_targets_are_projections_of_the_layers() -> None:
    model = adapted("gpt2")
    assert model.adapter is not None
    assert {name.split(".")[-4] for name in model.adapter.names} == {"c_attn", "c_proj", "c_fc"}
    with pytest.raises(ConfigError, match="'q_proj' matches no projection of the model; the nearest are c_proj"):
        add_lora(tiny_auto("gpt2"), LoraConfig(targets=("q_proj",)), 0)
    for target in ("wte", "lm_head"):
        with pytest.raises(ConfigError, match=f"'{target}' is no projection of a layer; those are c_attn, c_proj, c_fc"):
            add_lora(tiny_auto("gpt2"), LoraConfig(targets=(target,)), 0)


# ----------------------------------------------------------------------------------------------------------- on disk


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_loaded_bit_for_bit_here_and_by_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny_auto(kind)
    save_auto(model, tmp_path)
    assert torch.equal(logprobs(load_auto(tmp_path)), logprobs(model))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(rows()).logits
        assert torch.equal(theirs, model.whole(rows()).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of transformers, to peft
def test_an_adapter_is_saved_merged_and_in_the_format_of_peft(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    assert model.adapter is not None
    save_auto(model, tmp_path / "merged")
    torch.testing.assert_close(logprobs(load_auto(tmp_path / "merged")), logprobs(model), rtol=0, atol=1e-5)
    save_auto(tiny_auto(kind), tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    model.adapter.save(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(theirs(rows()).logits, model.whole(rows()).logits, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("bert", {}, "BertLMHeadModel lets a token see those after it"),
        ("gemma2", {"head_dim": 8}, "the logits of Gemma2ForCausalLM are more than .* cap"),
        ("granite", {"logits_scaling": 4.0}, "the logits of GraniteForCausalLM are more than .* scale"),
        ("phi", {}, "the logits of PhiForCausalLM are more than .* bias"),
    ],
)
def test_a_model_whose_logprobs_would_be_wrong_is_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        AutoDecoder(fresh(kind, **fields))


def test_a_cap_or_a_scale_that_does_nothing_is_fine() -> None:
    AutoDecoder(fresh("gemma2", head_dim=8, final_logit_softcapping=None))
    AutoDecoder(fresh("granite", logits_scaling=1.0))


def test_a_row_that_is_too_long_is_an_error() -> None:
    with pytest.raises(EngineError, match="129 tokens is longer than the model's 128 positions"):
        tiny_auto("gpt2").prefill(torch.zeros(1, 129, dtype=torch.int64))


def test_a_directory_that_holds_no_such_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no directory"):
        load_auto(tmp_path / "nothing")
    with pytest.raises(ModelError, match="transformers cannot load"):
        load_auto(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt3"}')
    with pytest.raises(ModelError, match="transformers cannot load"):
        load_auto(tmp_path)


def test_weights_that_are_missing_or_extra_or_of_another_shape_are_an_error(tmp_path: Path) -> None:
    save_auto(tiny_auto("gpt_neox"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    for what, other in {
        rf"missing .*{lost}": {name: tensor for name, tensor in weights.items() if name != lost},
        rf"mismatched .*{lost}": {**weights, lost: torch.zeros(3, 3)},
        rf"{weights[lost].numel():,} of the .* numbers of {lost} are NaN": {**weights, lost: weights[lost] * torch.nan},
        r"unexpected .*score\.weight": {**weights, "score.weight": torch.zeros(1, 16)},
    }.items():
        save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=what):
            load_auto(tmp_path)
