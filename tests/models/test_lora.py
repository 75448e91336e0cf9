"""LoRA on the decoder: nothing at first, off when switched off, PEFT's files, and targets that are there."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.errors import ConfigError
from tandem.models.adapters import Adapter, LoraConfig
from tandem.models.decoder import Decoder
from tandem.models.heads import next_logprobs
from tandem.models.hf import load_decoder, save_decoder
from tandem.models.lora import CONFIG, WEIGHTS, add_lora
from tandem.models.values import ValueModel
from tests.models.tiny import config, loud, tokens

SHAPE = config(intermediate_size=400)  # an inner dimension of two tiles
LORA = LoraConfig(rank=5, alpha=10.0)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(lora: LoraConfig = LORA, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """A loud decoder with an adapter that has learned something."""
    model = loud(SHAPE, dtype)
    add_lora(model, lora, seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


def adapter(model: Decoder) -> Adapter:
    assert model.adapter is not None
    return model.adapter


@torch.no_grad()
def logprobs(model: Decoder) -> Tensor:
    hidden = model.prefill(tokens(3, 20)).flatten(0, 1)
    return next_logprobs(model, hidden, torch.ones(len(hidden))).view(3, 20, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_at_first_and_switched_off_it_is_the_model_bit_for_bit(dtype: torch.dtype) -> None:
    want = logprobs(loud(SHAPE, dtype))
    fresh = loud(SHAPE, dtype)
    add_lora(fresh, LORA, 0)
    assert torch.equal(logprobs(fresh), want)
    model = adapted(dtype=dtype)
    changed = logprobs(model)
    assert (changed - want).abs().max() > 0.1
    with adapter(model).switched_off():
        assert torch.equal(logprobs(model), want)
    assert torch.equal(logprobs(model), changed)


def test_it_is_switched_on_again_after_an_error() -> None:
    model = adapted()
    want = logprobs(model)
    with pytest.raises(KeyError), adapter(model).switched_off():
        raise KeyError
    assert torch.equal(logprobs(model), want)


def test_the_adapter_alone_is_trained() -> None:
    model = adapted(LoraConfig(rank=5, targets=("q_proj", "down_proj")))
    model.prefill(tokens(2, 9)).square().sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == adapter(model).names
    assert sorted(with_gradient) == sorted(
        f"model.layers.{layer}.{module}.lora_{matrix}.default.weight"
        for layer in range(2)
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for matrix in "AB"
    )
    assert all(bool(parameter.grad.any()) for parameter in model.parameters() if parameter.grad is not None)


def test_gradients_are_those_of_the_merged_weight() -> None:
    """Of W + s B A the gradient G gives A s B^T G and B s G A^T."""
    model = adapted(LoraConfig(rank=5, alpha=10.0, targets=("up_proj",)))
    model.prefill(tokens(2, 9)).square().sum().backward()
    whole = loud(SHAPE)
    whole.load_state_dict(model.weights())
    whole.prefill(tokens(2, 9)).square().sum().backward()
    parameters, of_whole = dict(model.named_parameters()), dict(whole.named_parameters())
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj"
        a, b = (parameters[f"{name}.lora_{matrix}.default.weight"] for matrix in "AB")
        gradient = of_whole[f"{name}.weight"].grad
        assert gradient is not None
        torch.testing.assert_close(a.grad, 2 * b.detach().T @ gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))
        torch.testing.assert_close(b.grad, 2 * gradient @ a.detach().T, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


def test_it_begins_by_its_seed_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (adapted(seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    for name in adapter(first).names:
        a, b, c = (model.get_parameter(name) for model in (first, again, other))
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("lora_B" in name)


def test_copies_have_adapters_of_their_own() -> None:
    model = adapted()
    want = logprobs(model)
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logprobs(copy), want)
        with adapter(copy).switched_off():
            assert not torch.equal(logprobs(copy), want)
            assert torch.equal(logprobs(model), want)
        assert adapter(copy).base == adapter(model).base


def test_the_fingerprint_is_that_of_the_frozen_weights() -> None:
    one, other = adapted(), loud(SHAPE, seed=1)
    add_lora(other, LORA, 0)
    assert adapter(one).base == adapter(adapted(LoraConfig(rank=2, targets=("q_proj",)))).base
    assert adapter(one).base != adapter(other).base


# ----------------------------------------------------------------------------------------------------------- on disk


def test_merged_with_an_adapter_that_is_nothing_yet_a_model_is_itself_bit_for_bit() -> None:
    model, other = loud(SHAPE), loud(SHAPE)
    for each in (model, other):
        each.get_parameter("model.layers.0.mlp.up_proj.weight").data[0, 0] = -0.0
    add_lora(model, LORA, 0)
    for name, weight in model.weights().items():
        assert torch.equal(weight.view(torch.int32), other.weights()[name].view(torch.int32)), name


def test_merged_weights_are_a_plain_model_that_computes_the_same(tmp_path: Path) -> None:
    model = adapted()
    save_decoder(model, tmp_path)
    plain = load_decoder(tmp_path)
    assert plain.adapter is None
    assert list(dict(plain.named_parameters())) == list(model.weights())
    # Sums of up to 400 products in another order: each within 400 * 2^-24 of what is summed, over 14 projections.
    torch.testing.assert_close(logprobs(plain), logprobs(model), rtol=0, atol=400 * 2**-24 * 14)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of transformers, to peft
def test_peft_reads_what_is_saved_and_computes_the_same(tmp_path: Path) -> None:
    model = adapted(LoraConfig(rank=5, alpha=10.0, targets=("q_proj", "o_proj", "down_proj")))
    save_decoder(loud(SHAPE), tmp_path / "model")
    (tmp_path / "adapter").mkdir()
    adapter(model).save(tmp_path / "adapter")

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        got = theirs(tokens(3, 20)).logits.log_softmax(-1)
        with theirs.disable_adapter():
            off = theirs(tokens(3, 20)).logits.log_softmax(-1)
    assert (logprobs(model) - logprobs(loud(SHAPE))).abs().max() > 0.1
    torch.testing.assert_close(got, logprobs(model), rtol=0, atol=1e-4)
    torch.testing.assert_close(off, logprobs(loud(SHAPE)), rtol=0, atol=1e-4)

    written = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (written["peft_type"], written["r"], written["lora_alpha"]) == ("LORA", 5, 10.0)
    assert sorted(written["target_modules"]) == ["down_proj", "o_proj", "q_proj"]
    assert (written["lora_dropout"], written["inference_mode"]) == (0, True)
    names = load_file(tmp_path / "adapter" / WEIGHTS).keys()
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in names
    assert len(names) == 2 * 2 * 3


def test_the_adapter_names_the_model_that_it_goes_with(tmp_path: Path) -> None:
    model = loud(SHAPE)
    add_lora(model, LORA, 0, origin="org/name")
    adapter(model).save(tmp_path)
    assert peft.LoraConfig.from_pretrained(tmp_path).base_model_name_or_path == "org/name"


# ---------------------------------------------------------------------------------------------------------- bad input


def test_every_projection_of_the_layers_is_a_target_by_default() -> None:
    model = adapted()
    assert {name.split(".")[-4] for name in adapter(model).names} == set(PROJECTIONS)
    assert len(adapter(model).names) == 2 * 2 * len(PROJECTIONS)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_prj",), r"'q_prj' matches no projection of the model; the nearest are q_proj"),
        (("q_proj", "c_attn"), r"'c_attn' matches no projection"),
        (("xyz",), r"'xyz' matches no projection of the model; there are q_proj, k_proj, v_proj, o_proj, gate_proj"),
        (("roj",), r"'roj' matches no projection"),
        (("embed_tokens",), r"'embed_tokens' is no projection of a layer; those are q_proj"),
        (("self_attn",), r"'self_attn' is no projection"),
        (("lm_head",), r"'lm_head' is no projection"),
    ],
)
def test_a_target_that_is_no_projection_is_an_error(targets: tuple[str, ...], message: str) -> None:
    model = loud(config(tie_embeddings=False))
    before = list(dict(model.named_parameters()))
    with pytest.raises(ConfigError, match=rf"lora\.targets: {message}"):
        add_lora(model, LoraConfig(targets=targets), 0)
    assert list(dict(model.named_parameters())) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_head_of_values_is_no_target() -> None:
    with pytest.raises(ConfigError, match="'score' is no projection of a layer"):
        add_lora(ValueModel(SHAPE), LoraConfig(targets=("score",)), 0)


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("rank", -3), ("alpha", 0.0), ("alpha", float("nan"))])
def test_a_rank_and_a_scale_are_positive(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .* got {value}"):
        LoraConfig(**{field: value})
