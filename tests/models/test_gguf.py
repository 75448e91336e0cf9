"""GGUF files: exact round trips, transformers' reading of the same file, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.errors import ModelError
from tandem.models.decoder import Decoder
from tandem.models.gguf import load_gguf
from tests.models.gguf_files import write
from tests.models.tiny import config, loud, tokens

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_embeddings": False, "rope_theta": 1234.0, "rms_eps": 0.0009765625}),
    "llama-tied": ("llama", {"heads": 6, "kv_heads": 2, "head_dim": 8}),
    "qwen2": ("qwen2", {"attention_bias": True}),
    "qwen3": ("qwen3", {"qk_norm": True, "head_dim": 32}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_and_the_shape_come_back_exactly(name: str, tmp_path: Path) -> None:
    kind, fields = MODELS[name]
    decoder = loud(config(**fields))
    write(tmp_path / "m.gguf", decoder, kind)
    again, metadata = load_gguf(tmp_path / "m.gguf")
    assert again.config == decoder.config
    weights = decoder.weights()
    assert again.weights().keys() == weights.keys()
    for weight, tensor in again.weights().items():
        assert torch.equal(tensor, weights[weight]), weight
    assert metadata["general.architecture"] == kind


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    kind, fields = MODELS[name]
    head_dim = 128 if kind == "qwen3" else 12  # what it takes heads to be, whatever the file says
    write(tmp_path / "m.gguf", loud(config(**fields | {"head_dim": head_dim})), kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    ours, _ = load_gguf(tmp_path / "m.gguf")
    rows = tokens(2, 30)
    with torch.no_grad():
        found, want = ours.prefill(rows) @ ours.output_weight.T, theirs(rows).logits
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("form", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_matrices_are_what_they_hold(form: str, tmp_path: Path) -> None:
    decoder = loud(config(hidden_size=64))
    write(tmp_path / "m.gguf", decoder, quantise=form)
    again, _ = load_gguf(tmp_path / "m.gguf")
    number, name = gguf.GGMLQuantizationType[form], "model.layers.1.mlp.up_proj.weight"
    want = torch.tensor(gguf.dequantize(gguf.quantize(decoder.weights()[name].numpy(), number), number))
    assert torch.equal(again.weights()[name], want)
    assert not torch.equal(want, decoder.weights()[name])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kind": "mamba"}, "architecture 'mamba' is not supported, only llama, qwen2, qwen3 are"),
        ({"metadata": {"llama.expert_count": 8}}, r"llama\.expert_count=8 is not supported"),
        ({"metadata": {"llama.attention.sliding_window": 32}}, r"llama\.attention\.sliding_window=32 is not supported"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, r"llama\.rope\.dimension_count=4 of 16 is not supported"),
        ({"leave_out": "blk.1.attn_v|ffn_norm"}, r"missing model\.layers\.0\.post_attention_layernorm\.weight; missing .*v_proj"),
        ({"leave_out": "token_embd"}, r"there is no token_embd\.weight"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", loud(config()), **how)
    with pytest.raises(ModelError, match=message):
        load_gguf(tmp_path / "m.gguf")


def test_tensors_that_do_not_fit_the_metadata_are_refused(tmp_path: Path) -> None:
    decoder = Decoder(config())
    decoder.model.norm.weight = torch.nn.Parameter(torch.ones(47))
    write(tmp_path / "m.gguf", decoder)
    with pytest.raises(ModelError, match=r"output_norm\.weight has shape \[47\], expected \[48\]"):
        load_gguf(tmp_path / "m.gguf")


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    decoder = loud(config())
    with torch.no_grad():
        decoder.model.norm.weight[5] = torch.inf
    write(tmp_path / "m.gguf", decoder)
    with pytest.raises(ModelError, match=r"1 of the 48 numbers of output_norm\.weight are NaN or infinite"):
        load_gguf(tmp_path / "m.gguf")


def test_files_that_are_none_or_damaged_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    write(whole, loud(config()))
    data = whole.read_bytes()
    for size in (4, 20, 100, 500, len(data) // 2, len(data) - 100):
        whole.write_bytes(data[:size])
        with pytest.raises(ModelError, match="damaged"):
            load_gguf(whole)
    whole.write_bytes(b"{}")
    with pytest.raises(ModelError, match=r"is no GGUF file: it begins with b'\{\}'"):
        load_gguf(whole)
