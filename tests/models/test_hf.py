"""Hugging Face directories against transformers itself: logits, round trips both ways, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tandem.errors import EngineError, ModelError, SnapshotError
from tandem.models.decoder import Decoder
from tandem.models.hf import check_values, load_decoder, load_value_model, read_config, save_decoder
from tandem.models.kv_cache import KVCache
from tandem.models.values import value_model_on
from tests.models.tiny import config, loud, tokens

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
STRETCHED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED |= {"original_max_position_embeddings": 32}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE, rms_norm_eps=1e-5),
    "llama-tied-all-heads": lambda: LlamaConfig(**SHAPE | {"num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama-biases": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama-theta": lambda: LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2-tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama-stretched": lambda: LlamaConfig(**SHAPE, rope_parameters=STRETCHED),
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=12, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SHAPE, head_dim=16, sliding_window=120),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "gemma": lambda: GemmaConfig(**SHAPE, head_dim=16),
    "smollm3": lambda: SmolLM3Config(**SHAPE, no_rope_layers=[0, 1], pad_token_id=0),
    "smollm3-default-layers": lambda: SmolLM3Config(**SHAPE | {"num_hidden_layers": 5}, tie_word_embeddings=False, pad_token_id=0),
    "qwen3-biases": lambda: Qwen3Config(**SHAPE, head_dim=32, attention_bias=True, tie_word_embeddings=True),
}


def reference(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits(decoder: Decoder, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return decoder.prefill(rows) @ decoder.output_weight.T


def assert_same_tensors(model: PreTrainedModel, other: PreTrainedModel) -> None:
    state, others = model.state_dict(), other.state_dict()
    assert state.keys() == others.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, others[name]), name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with a Llama model as this library writes it."""
    save_decoder(loud(config(tie_embeddings=False)), tmp_path)
    return tmp_path


def edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_and_tensors_survive_the_round_trip(name: str, tmp_path: Path) -> None:
    model, rows = reference(name), tokens(3, 120)
    model.save_pretrained(tmp_path / "theirs")
    decoder = load_decoder(tmp_path / "theirs")
    with torch.no_grad():
        want = model(rows).logits
    assert want.std() > 0.3
    torch.testing.assert_close(logits(decoder, rows), want, rtol=0, atol=1e-5)
    save_decoder(decoder, tmp_path / "ours", eos_id=5)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    if not name.startswith("mistral"):  # which is Llama, once its window is no longer than a row
        assert type(back) is type(model)
    assert_same_tensors(model, back)
    assert back.generation_config.eos_token_id == 5
    with torch.no_grad():
        torch.testing.assert_close(back(rows).logits, want, rtol=0, atol=1e-5)
    again = load_decoder(tmp_path / "ours")
    assert again.config == decoder.config
    assert torch.equal(logits(again, rows), logits(decoder, rows))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Theirs of whole rows, ours with a cache, as generation does it."""
    model, rows, steps = reference(name), tokens(6, 9), 12
    model.save_pretrained(tmp_path)
    decoder, last, found = load_decoder(tmp_path), rows[:, -1], list[torch.Tensor]()
    cache = KVCache(decoder.config, 6, 9 + steps)
    with torch.no_grad():
        decoder.prefill(rows[:, :-1], cache)
        for position in range(8, 8 + steps):
            last = (decoder.decode(last, torch.full((6,), position), cache) @ decoder.output_weight.T).argmax(1)
            found.append(last)
            rows = torch.cat([rows, model(rows).logits[:, -1].argmax(1)[:, None]], 1)
    assert torch.equal(torch.stack(found, 1), rows[:, 9:])
    assert len(rows[:, 9:].unique()) > 3


def test_rows_are_no_longer_than_a_sliding_window(tmp_path: Path) -> None:
    """Where they would be, transformers' numbers are others."""
    model = reference("mistral-window")
    model.save_pretrained(tmp_path)
    decoder, rows = load_decoder(tmp_path), tokens(1, 121)
    assert decoder.config.max_positions == 120
    with torch.no_grad():
        full = Decoder(replace(decoder.config, max_positions=256))
        full.load_state_dict(decoder.state_dict())
        assert (logits(full, rows) - model(rows).logits).abs().max() > 1e-3
    with pytest.raises(EngineError, match="a row of 121 tokens is longer than the model's 120 positions"):
        decoder.prefill(rows)


def test_shards_and_half_precision_are_read(tmp_path: Path) -> None:
    model = reference("qwen2").to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    decoder = load_decoder(tmp_path, torch.bfloat16)
    assert decoder.dtype == torch.bfloat16
    for name, parameter in decoder.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, model.state_dict()[name].float()), name


def test_fields_of_before_transformers_5(saved: Path) -> None:
    file = saved / "config.json"
    fields = json.loads(file.read_text())
    for name in ("rope_parameters", "head_dim", "num_key_value_heads"):
        del fields[name]
    file.write_text(json.dumps(fields | {"hidden_size": 64, "rope_theta": 1234.0, "rope_scaling": None}))
    with pytest.raises(ModelError, match=r"misshaped model\.layers\.0\.self_attn\.k_proj\.weight: \[32, 48\], expected \[64, 64\]"):
        load_decoder(saved)
    edit(saved, hidden_size=48, num_key_value_heads=2, head_dim=16)
    assert load_decoder(saved).config.rope_theta == 1234.0


def test_old_frequencies_and_an_equal_copy_of_the_tied_layer_are_fine(tmp_path: Path) -> None:
    decoder = loud(config())
    save_decoder(decoder, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(load_decoder(tmp_path).output_weight, decoder.output_weight)
    state["lm_head.weight"][3, 3] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"extra lm_head\.weight: it differs from the embedding"):
        load_decoder(tmp_path)


def test_all_wrong_tensors_are_listed_at_once(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    del state["model.norm.weight"], state["lm_head.weight"]
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4)
    state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3, 4)
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 48, dtype=torch.int8)
    save_file(state, saved / "model.safetensors")
    with pytest.raises(ModelError) as error:
        load_decoder(saved)
    assert str(error.value).splitlines()[1:] == [
        "  extra model.layers.7.mlp.up_proj.weight",
        "  misshaped model.layers.1.mlp.up_proj.weight: [3, 4], expected [96, 48]",
        "  missing lm_head.weight [61, 48]",
        "  missing model.norm.weight [48]",
        "  model.layers.0.mlp.up_proj.weight is of type I8, expected one of F64, F32, F16, BF16",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported; llama, mistral, qwen2, qwen3, gemma, smollm3 are"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "needs the numbers low_freq_factor, high_freq_factor in"),
        ({"rope_parameters": STRETCHED | {"factor": 0.5}}, "rotary positions cannot be stretched by"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters=.* and rope_scaling=.*'yarn'.* say different things"),
        ({"rope_parameters": "yarn"}, "must be objects, got 'yarn'"),
        (
            {"rms_norm_eps": "1e-6", "sliding_window": [8]},
            r"rms_norm_eps must be a number, .*; sliding_window must be a number, got \[8\]",
        ),
        ({"layer_types": 3}, "config.json: "),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types \['chunked_attention'\] are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1 is not supported"),
        ({"hidden_size": "48"}, "hidden_size must be a positive integer, got '48'"),
        ({"num_hidden_layers": None, "vocab_size": 0}, "vocab_size must be .* got 0; num_hidden_layers must be .* got None"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(saved: Path, fields: dict[str, Any], message: str) -> None:
    edit(saved, **fields)
    with pytest.raises(ModelError, match=message):
        load_decoder(saved)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_numbers_that_are_none_are_refused(value: float, saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, :2] = value
    save_file(tensors, saved / "model.safetensors")
    shape = list(tensors["model.layers.1.mlp.up_proj.weight"].shape)
    message = rf"2 of the {shape[0] * shape[1]:,} numbers of model\.layers\.1\.mlp\.up_proj\.weight are NaN or infinite"
    with pytest.raises(ModelError, match=message):
        load_decoder(saved)
    with torch.device("meta"):
        outline = Decoder(read_config(saved))
    with pytest.raises(ModelError, match=message):
        check_values(outline, saved)


def test_an_index_that_names_another_file_is_refused(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    save_file({"other": torch.zeros(1)}, saved / "other.safetensors")
    index = dict.fromkeys(state, "model.safetensors") | {"model.norm.weight": "other.safetensors"}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match=r"missing model\.norm\.weight, which is not in the file that"):
        load_decoder(saved)


def test_a_directory_that_is_none_is_refused(saved: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*nowhere/config\.json: No such file or directory; a Hugging Face"):
        load_decoder(saved / "nowhere")
    weights = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors: .*; fetch or save the model again"):
        load_decoder(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_decoder(saved)
    for content in ("{}", '{"weight_map": 3}', '{"weight_map": {"lm_head.weight": 3}}'):
        (saved / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ModelError, match=r"index\.json has no weight_map"):
            load_decoder(saved)
    (saved / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-1.safetensors"}}')
    with pytest.raises(ModelError, match=r"cannot read .*model-1\.safetensors"):
        load_decoder(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        load_decoder(saved)
    (saved / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json must hold a JSON object"):
        load_decoder(saved)


@pytest.mark.parametrize(
    "fields",
    [
        {"qk_norm": True, "mlp_bias": True},
        {"qk_norm": True, "attention_bias": True},
        {"output_bias": True},
        {"attention_bias": True, "mlp_bias": True},
        {"heads": 9, "kv_heads": 3},
        {"activation": "gelu_tanh"},
        {"norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 2.0},
        {"norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 48**0.5, "qk_norm": True},
        {"norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 48**0.5, "mlp_bias": True},
        {"unrotated": (1,), "qk_norm": True, "head_dim": 12},
        {"unrotated": (1,), "head_dim": 16},
    ],
)
def test_a_shape_that_no_architecture_has_is_not_written(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none of llama, .*, smollm3 has .*, so that the model cannot be written"):
        save_decoder(Decoder(config(**fields)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match=r"cannot write the model to .*file"):
        save_decoder(Decoder(config()), tmp_path / "file")


def test_a_value_model_is_transformers_classifier_of_one_label(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForSequenceClassification.from_config(
        Qwen2Config(**SHAPE, num_labels=1, pad_token_id=0), attn_implementation="eager"
    ).eval()
    theirs.save_pretrained(tmp_path)
    ours, rows = load_value_model(tmp_path), tokens(1, 9)
    with torch.no_grad():
        found = ours.values(ours.prefill(rows)[0])
        for length in (1, 4, 9):
            want = theirs(rows[:, :length]).logits[0, 0]
            torch.testing.assert_close(found[length - 1], want, rtol=1e-5, atol=1e-5)


def test_a_value_model_takes_the_body_of_a_language_model(tmp_path: Path) -> None:
    decoder = loud(config(tie_embeddings=False))
    save_decoder(decoder, tmp_path)
    model, rows = load_value_model(tmp_path), tokens(2, 5)
    assert torch.equal(model.prefill(rows), decoder.prefill(rows))
    assert not model.values(model.prefill(rows)[0]).any()
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("qk_norm", [False, True])
def test_transformers_scores_as_a_saved_value_model_does(qk_norm: bool, tmp_path: Path) -> None:
    """The value of the state before the token that ends a response, with which rows are padded."""
    model = value_model_on(loud(config(qk_norm=qk_norm, tie_embeddings=False)))
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    save_decoder(model, tmp_path, eos_id=3)
    theirs, again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval(), load_value_model(tmp_path)
    rows = torch.where(tokens(2, 9) == 3, 4, tokens(2, 9))
    rows[0, 6:], rows[1, 8:] = 3, 3
    with torch.no_grad():
        want, found = theirs(rows).logits, torch.stack([again.values(hidden) for hidden in again.prefill(rows)])
    assert want.shape == (2, 1)
    assert want.abs().min() > 0.1
    torch.testing.assert_close(torch.stack([found[0, 5], found[1, 7]]), want[:, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match=r"extra score\.weight, the head of a value model"):
        load_decoder(tmp_path)


def test_a_value_model_shares_the_body_of_the_decoder_that_it_is_on() -> None:
    decoder, rows = loud(config()), tokens(2, 5)
    model = value_model_on(decoder)
    assert value_model_on(model) is model
    with torch.no_grad():
        decoder.model.norm.weight.mul_(2)
    assert torch.equal(model.prefill(rows), decoder.prefill(rows))
