"""Tiny GGUF files, written by the package `gguf` from a decoder of ours, in the order of rows that llama.cpp has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.models.decoder import Decoder

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "One fish, two fish, red fish, blue fish: 12 fish and 345 more.\n\n  The naïve café isn't open;\tit's closed.\n" * 3
NAMES = {
    r"model\.embed_tokens": "token_embd",
    r"model\.norm": "output_norm",
    r"lm_head": "output",
    r"model\.layers\.(\d+)\.input_layernorm": r"blk.\1.attn_norm",
    r"model\.layers\.(\d+)\.post_attention_layernorm": r"blk.\1.ffn_norm",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"blk.\1.attn_output",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"blk.\1.attn_\2",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm": r"blk.\1.attn_\2_norm",
    r"model\.layers\.(\d+)\.mlp\.(\w+)_proj": r"blk.\1.ffn_\2",
}


def bpe(vocab_size: int, digits: bool = True) -> Backend:
    """Trained on TEXT, with SPECIAL first."""
    backend = Backend(models.BPE())
    first = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return backend


def write(
    path: Path,
    decoder: Decoder,
    kind: str = "llama",
    *,
    tokenizer: Backend | None = None,
    pre: str = "smollm",
    quantise: str | None = None,
    metadata: dict[str, Any] | None = None,
    leave_out: str = "-",
) -> None:
    """quantise: a format for the MLP's matrices. metadata: further integers. leave_out: tensors whose names match."""
    c, writer = decoder.config, gguf.GGUFWriter(path, kind)
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_eps)
    writer.add_vocab_size(c.vocab_size)
    for name, value in (metadata or {}).items():
        writer.add_uint32(name, value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, pre)
    for name, weight in decoder.weights().items():
        part, _, end = name.rpartition(".")
        place = next(re.sub(source, target, part) for source, target in NAMES.items() if re.fullmatch(source, part))
        array = weight.numpy()
        if kind == "llama" and re.search(r"attn_[qk]$", place):  # as llama.cpp's converter permutes
            heads = c.num_heads if place.endswith("q") else c.num_kv_heads
            array = array.reshape(heads, 2, c.head_dim // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if re.search(leave_out, place):
            continue
        if quantise is not None and "ffn_" in place and array.ndim == 2:
            form = gguf.GGMLQuantizationType[quantise]
            writer.add_tensor(f"{place}.{end}", gguf.quantize(array, form), raw_dtype=form)
        else:
            writer.add_tensor(f"{place}.{end}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: Backend, pre: str) -> None:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
