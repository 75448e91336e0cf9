"""The decoder itself: shapes that are refused, limits, the cache, initial weights, copies in the compute dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.models.decoder import Decoder, init_decoder
from tandem.models.heads import next_logprobs, row_logprobs
from tandem.models.kv_cache import KVCache
from tandem.models.windows import window_cut
from tests.models.tiny import config, loud, tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"max_positions": -1}, "max_positions must be at least 1, got -1"),
        ({"heads": 6, "kv_heads": 4}, "num_heads must be a multiple of num_kv_heads, got 6 and 4"),
        ({"head_dim": 15}, "head_dim must be even for rotary positions, got 15"),
        ({"rope_theta": 0.0}, r"rope_theta must be positive, got 0\.0"),
        ({"rms_eps": float("nan")}, "rms_eps must be positive, got nan"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_parameters_have_their_hugging_face_names() -> None:
    names = {name for name, _ in Decoder(config(qk_norm=True, tie_embeddings=False, attention_bias=True)).named_parameters()}
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.1.input_layernorm.weight"):
        assert name in names
    for name in ("q_proj.weight", "q_proj.bias", "v_proj.bias", "o_proj.weight", "q_norm.weight", "k_norm.weight"):
        assert f"model.layers.0.self_attn.{name}" in names
    assert "model.layers.0.self_attn.o_proj.bias" not in names
    assert not any(name.startswith("lm_head") for name, _ in Decoder(config()).named_parameters())
    assert dict(Decoder(config()).named_buffers(remove_duplicate=False)).keys() == {"cos", "sin"}
    assert Decoder(config()).state_dict().keys() == dict(Decoder(config()).named_parameters()).keys()


def test_the_bytes_of_a_cache_are_known_before_it_is_there() -> None:
    cache = KVCache(config(num_layers=3, head_dim=32), 3, 21)
    assert KVCache.num_bytes(config(num_layers=3, head_dim=32), 3, 21) == cache.keys.nbytes + cache.values.nbytes


def test_initial_weights_follow_from_the_seed() -> None:
    first, again, other = (init_decoder(config(attention_bias=True), seed) for seed in (5, 5, 6))
    state = first.state_dict()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in state.items())
    assert not torch.equal(state["model.embed_tokens.weight"], other.state_dict()["model.embed_tokens.weight"])
    assert state["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert not state["model.layers.0.self_attn.q_proj.bias"].any()
    assert state["model.norm.weight"].eq(1).all()


def test_a_layer_sees_its_parameters_rounded_to_the_compute_dtype() -> None:
    decoder, rows = loud(config(qk_norm=True, attention_bias=True), torch.bfloat16), tokens(2, 21)
    before = decoder.prefill(rows)
    with torch.no_grad():
        for parameter in decoder.model.layers.parameters():
            parameter.copy_(parameter.bfloat16())
    assert torch.equal(decoder.prefill(rows), before)


def test_right_padding_is_inert() -> None:
    decoder, row = loud(config()), tokens(2, 21)
    for width in (22, 40):
        wide = torch.cat([row, tokens(2, width - 21, seed=9)], 1)
        assert torch.equal(decoder.prefill(wide)[:, :21], decoder.prefill(row))


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_short_rows(length: int) -> None:
    decoder, row = loud(config(heads=2, kv_heads=2)), tokens(1, 16)
    hidden = decoder.prefill(row[:, :length])
    assert hidden.shape == (1, length, 48)
    assert torch.equal(hidden, decoder.prefill(row)[:, :length])


def test_prefill_fills_any_slots_and_copies_go_on_alone() -> None:
    decoder, rows = loud(config()), tokens(2, 12)
    want = decoder.prefill(rows)
    cache = KVCache(decoder.config, 5, 12)
    with torch.inference_mode():
        decoder.prefill(rows[:, :11], cache, torch.tensor([4, 2]))
        cache.copy(torch.tensor([4, 2, 4]), torch.tensor([0, 1, 2]), 11)
        got = decoder.decode(rows[[0, 1, 0], 11], torch.tensor([11, 11, 11]), cache)
    assert torch.equal(got, want[[0, 1, 0], 11])


def test_a_cache_may_hold_the_compute_dtype_or_float32() -> None:
    decoder, rows = loud(config(), torch.bfloat16), tokens(3, 12)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(decoder.config, 3, 12, dtype)
        with torch.inference_mode():
            decoder.prefill(rows[:, :9], cache)
            found.append(decoder.decode(rows[:, 9], torch.tensor([9, 9, 9]), cache))
    assert torch.equal(*found)


def test_stale_columns_are_not_seen() -> None:
    decoder, rows = loud(config()), tokens(1, 30)
    fresh, used = KVCache(decoder.config, 1, 30), KVCache(decoder.config, 1, 30)
    with torch.inference_mode():
        decoder.prefill(tokens(1, 30, seed=7), used)
        for cache in (fresh, used):
            decoder.prefill(rows[:, :10], cache)
        arguments = rows[:, 10], torch.tensor([10])
        assert torch.equal(decoder.decode(*arguments, fresh), decoder.decode(*arguments, used))


def test_a_step_touches_no_slot_but_its_rows() -> None:
    """Though it is padded with rows of its own."""
    decoder, rows = loud(config()), tokens(5, 12)
    cache = KVCache(decoder.config, 5, 12)
    with torch.inference_mode():
        decoder.prefill(rows, cache)
        before = cache.keys[:, :5].clone(), cache.values[:, :5].clone()
        decoder.decode(rows[:2, 8], torch.tensor([8, 8]), cache)
    for tensor, was in zip((cache.keys, cache.values), before, strict=True):
        assert torch.equal(tensor[:, 2:5], was[:, 2:])
        assert torch.equal(tensor[:, :2, :, :8], was[:, :2, :, :8])


def test_rows_are_cut_where_it_spares_keys() -> None:
    long, short = [900] * 20, [10] * 60
    assert window_cut(np.array(long + short)) == (32, 48 * 890)
    assert window_cut(np.array(short + long)) == (48, 48 * 890)
    assert window_cut(np.array([900] * 8 + [890] * 40)) == (0, 0)
    assert window_cut(np.array([700])) == (0, 0)
    assert window_cut(np.array([700] + [1] * 15)) == (0, 0)


def test_both_parts_of_a_cut_step_are_the_training_forward() -> None:
    decoder, rows = loud(config()), tokens(40, 150)
    want = decoder.prefill(rows)
    positions = torch.tensor([149, 120, *range(3, 41)])
    assert window_cut(positions.numpy())[0] == 16
    cache = KVCache(decoder.config, 40, 150)
    with torch.inference_mode():
        decoder.prefill(rows, cache)
        got = decoder.decode(rows[torch.arange(40), positions], positions, cache)
    assert torch.equal(got, want[torch.arange(40), positions])


def test_limits_are_named() -> None:
    decoder = loud(config(max_positions=20))
    cache = KVCache(decoder.config, 2, 16)
    with pytest.raises(EngineError, match="a row of 21 tokens is longer than the model's 20 positions"):
        decoder.prefill(tokens(1, 21))
    with pytest.raises(EngineError, match="1 rows of 17 tokens do not fit a cache of 2 slots of 16"):
        decoder.prefill(tokens(1, 17), cache)
    with pytest.raises(EngineError, match="3 rows of 5 tokens do not fit"):
        decoder.decode(tokens(1, 3)[0], torch.tensor([1, 4, 2]), cache)
    with pytest.raises(EngineError, match="2 rows of 17 tokens do not fit"):
        decoder.decode(tokens(1, 2)[0], torch.tensor([16, 2]), cache)


def decoded(decoder: Decoder, cache: KVCache, row: Tensor) -> Tensor:
    """Log-probabilities after the last token of `row` [1, T], with all before it in slot 0."""
    last = row.shape[1] - 1
    with torch.inference_mode():
        if last:
            decoder.prefill(row[:, :last], cache)
        return next_logprobs(decoder, decoder.decode(row[:, last], torch.tensor([last]), cache), torch.ones(1), cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"foreach": True}, {"fused": True}], ids=["default", "foreach", "fused"])
def test_a_new_cache_sees_new_weights(fields: dict[str, bool], dtype: torch.dtype) -> None:
    """However an optimiser writes: the fused one of torch 2.13 does not move a parameter's version counter."""
    decoder, row = loud(config(tie_embeddings=False), dtype), tokens(1, 9)
    before = decoded(decoder, KVCache(decoder.config, 1, 9), row)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.01, **fields)
    row_logprobs(decoder, row, torch.tensor([9]), torch.arange(9)[None] > 0, torch.ones(1))[0].sum().backward()
    optimizer.step()
    after = decoded(decoder, KVCache(decoder.config, 1, 9), row)
    assert not torch.equal(after, before)
    with torch.no_grad():
        assert torch.equal(after, next_logprobs(decoder, decoder.prefill(row)[:, -1], torch.ones(1)))


def test_a_cache_keeps_no_graph_and_prefill_into_one_makes_none() -> None:
    decoder, cache = loud(config(), torch.bfloat16), KVCache(config(), 1, 9)
    assert not decoder.prefill(tokens(1, 8), cache).requires_grad
    hidden = decoder.decode(tokens(1, 1)[0], torch.tensor([8]), cache)
    next_logprobs(decoder, hidden, torch.ones(1), cache)
    assert not hidden.requires_grad
    assert not cache.keys.requires_grad
    assert cache.weights is not None
    assert cache.output is not None
    assert not any(tensor.requires_grad for tensor in (cache.output.weight, *cache.weights.tensors))
