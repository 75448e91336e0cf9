"""GGUF files, as llama.cpp writes them: a decoder from one, and the metadata that a tokenizer is made of.

The container and the formats of quantised tensors are the package `gguf`'s business; which tensor is which weight, and in what
order its rows are, is ours. Weights come out in float32: what a quantised file holds, no more. What the decoder does not compute
is refused by name. It writes no GGUF.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tandem.errors import ModelError
from tandem.models.decoder import Decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.models.hf import check_finite

gguf = cast("Any", importlib.import_module("gguf"))  # untyped, and its extra need not be installed

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DAMAGE = (ValueError, LookupError, OverflowError, TypeError, AttributeError)  # what the reader raises on bytes that are no GGUF
_ABSENT: Mapping[str, tuple[object, ...]] = {
    "expert_count": (None, 0),
    "rope.scaling.type": (None, "none"),
    "attention.sliding_window": (None, 0),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
}
"""Metadata with the only values that the decoder computes."""


def load_gguf(path: Path) -> tuple[Decoder, Mapping[str, Any]]:
    """The decoder in the file `path`, and its metadata. Raises ModelError for what is damaged or not supported."""
    reader, metadata = _read(path)
    tensors = {str(tensor.name): tensor for tensor in reader.tensors}
    decoder = Decoder(_config(path, metadata, tensors))
    permuted = metadata["general.architecture"] == "llama"
    parameters = decoder.own_parameters()
    sources = {_hf_name(name): tensor for name, tensor in tensors.items()}
    problems = [f"missing {name}" for name in parameters.keys() - sources.keys()]
    problems += [f"extra {sources[name].name}" for name in sources.keys() - parameters.keys()]
    if problems:
        raise ModelError(f"{path} does not hold the tensors that its metadata describe: {'; '.join(sorted(problems))}")
    for name, parameter in parameters.items():
        weight = _dequantised(path, sources[name])
        if permuted and re.search(r"self_attn\.[qk]_proj", name):
            weight = _halves(weight, decoder.config.head_dim)
        if weight.shape != parameter.shape:
            raise ModelError(f"{path}: {sources[name].name} has shape {list(weight.shape)}, expected {list(parameter.shape)}")
        check_finite(weight, str(sources[name].name), path)
        with torch.no_grad():
            parameter.copy_(weight)
    return decoder, metadata


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"{path} is no GGUF file: it begins with {magic!r}")
        reader = gguf.GGUFReader(path)
        metadata = {str(name): field.contents() for name, field in reader.fields.items()}
    except ModelError:
        raise
    except _DAMAGE as error:
        raise ModelError(f"{path} is a damaged GGUF file: {error}; fetch it again") from error
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {kind!r} is not supported, only {', '.join(ARCHITECTURES)} are")
    return reader, metadata


def _config(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    kind = str(metadata["general.architecture"])
    here = {name.removeprefix(f"{kind}."): value for name, value in metadata.items() if name.startswith(f"{kind}.")}
    problems = [f"{kind}.{name}={here[name]!r} is not supported" for name, fine in _ABSENT.items() if here.get(name) not in fine]
    if "rope_freqs.weight" in tensors:
        problems.append("rope_freqs.weight, scaled rotary positions, is not supported: import the model's Hugging Face directory")
    needed = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length")
    problems += [f"{kind}.{name} must be an integer, got {here.get(name)!r}" for name in needed if type(here.get(name)) is not int]
    if "token_embd.weight" not in tensors:
        problems.append("there is no token_embd.weight")
    if problems:
        raise ModelError(f"{path}: {'; '.join(problems)}")
    heads, width = here["attention.head_count"], here["embedding_length"]
    head_dim = here.get("attention.key_length") or width // max(heads, 1)
    if (turned := here.get("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"{path}: {kind}.rope.dimension_count={turned} of {head_dim} is not supported")
    try:
        return DecoderConfig(
            vocab_size=int(tensors["token_embd.weight"].shape[-1]),
            hidden_size=width,
            intermediate_size=here["feed_forward_length"],
            num_layers=here["block_count"],
            num_heads=heads,
            num_kv_heads=here.get("attention.head_count_kv", heads),
            head_dim=head_dim,
            rope_theta=_decimal(here.get("rope.freq_base", 10_000.0)),
            rms_eps=_decimal(here.get("attention.layer_norm_rms_epsilon", 1e-6)),
            tie_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            max_positions=here["context_length"],
        )
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error


def _decimal(number: float) -> float:
    """The shortest decimal that is this number in float32, in which files keep it."""
    return float(str(np.float32(number)))


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; its own, where it has none."""
    part, _, kind = name.rpartition(".")
    if part in _WHOLE:
        return f"{_WHOLE[part]}.{kind}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", part)
    return f"model.layers.{found[1]}.{_OF_LAYER[found[2]]}.{kind}" if found and found[2] in _OF_LAYER else name


def _dequantised(path: Path, tensor: Any) -> Tensor:
    """Float32, of the shape that it has in Hugging Face files."""
    try:
        return torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError as error:
        raise ModelError(f"{path}: the format {tensor.tensor_type.name} of {tensor.name} is not read: {error}") from error
    except _DAMAGE as error:
        raise ModelError(f"{path}: {tensor.name} is damaged: {error}; fetch the file again") from error


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of queries or keys in the order of Hugging Face: pairs to turn are (i, i + d/2), where llama.cpp has (2i, 2i + 1)."""
    rows = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)
