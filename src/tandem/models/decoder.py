"""The decoder that training and native rollout share: one definition, three ways through it.

`Decoder.prefill` reads whole rows at once, `Decoder.decode` one token a row against a `KVCache`, `Decoder.extend` what is new of
rows that the cache has; all run the same layers on [M, D] rows through `numerics`. Grouped-query attention, rotary positions, RMS
norm, gated MLP, tied or untied embeddings, and what a family adds to that by configuration: Llama, Mistral, Qwen2, Qwen3, Gemma,
SmolLM. It does not sample, it has no output layer (heads.py turns hidden states into log-probabilities), and it runs on the CPU.

Parameters are float32 and have their Hugging Face names. A layer sees all of its own rounded to the compute dtype, so that
a sharded layer can be gathered in that dtype and be the same. Products with weights run in the compute dtype, all else
(residual stream, norms, positions, attention) in float32. Each layer is called as a module: what hooks into modules works, but
for decode steps, which replay.py runs without their Python once there have been many of them.

Legend: B rows, T padded time, S decode rows, W window of keys, M rows of a product (B * T or S, padded as numerics says),
D width, H heads, K key-value heads, G = H / K, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tandem.errors import EngineError
from tandem.models import numerics
from tandem.models.decoder_config import DecoderConfig
from tandem.models.kv_cache import KVCache, Weights
from tandem.models.language_model import LanguageModel
from tandem.models.numerics import KEYS, QUERIES, ROWS, in_dtype, padded
from tandem.models.prefixes import Prefixes, causal_bias, output_places, prefixes
from tandem.models.projections import Apart, LayerWeights, Linear
from tandem.models.replay import Leaves, Replay
from tandem.models.windows import window_cut

PASS_ROWS = 16  # rows of a pass are a multiple of: `numerics.gate` copies nothing then, where a width is a multiple of 8
# (layer, queries [M, H, d], keys [M, K, d], values [M, K * d]) -> [M, H * d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# ------------------------------------------------------------------------- parameters, by their Hugging Face names


class Projection(nn.Module):
    """A weight [outputs, inputs], zeros at first, with a bias or without."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def linear(self, dtype: torch.dtype) -> Linear:
        return Linear(in_dtype(self.weight, dtype), None if self.bias is None else in_dtype(self.bias, dtype))


class _Norm(nn.Module):
    def __init__(self, size: int, offset: float) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.full((size,), 1 - offset))

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """What a norm multiplies with, in float32: the weight, of values that `dtype` holds, and the offset."""
        weight = in_dtype(in_dtype(self.weight, dtype), torch.float32)
        return weight + self.offset if self.offset else weight


class _SelfAttention(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.q_proj = Projection(c.hidden_size, c.num_heads * c.head_dim, c.attention_bias)
        self.k_proj = Projection(c.hidden_size, c.num_kv_heads * c.head_dim, c.attention_bias)
        self.v_proj = Projection(c.hidden_size, c.num_kv_heads * c.head_dim, c.attention_bias)
        self.o_proj = Projection(c.num_heads * c.head_dim, c.hidden_size, c.output_bias)
        self.q_norm = _Norm(c.head_dim, c.norm_offset) if c.qk_norm else None
        self.k_norm = _Norm(c.head_dim, c.norm_offset) if c.qk_norm else None


class _MLP(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.up_proj = Projection(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.down_proj = Projection(c.intermediate_size, c.hidden_size, c.mlp_bias)


class _Layer(nn.Module):
    def __init__(self, c: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.index, self.dtype = c, index, dtype
        self.input_layernorm = _Norm(c.hidden_size, c.norm_offset)
        self.self_attn = _SelfAttention(c)
        self.post_attention_layernorm = _Norm(c.hidden_size, c.norm_offset)
        self.mlp = _MLP(c)

    def weights(self) -> LayerWeights:
        """What a forward computes with: all parameters of the layer, rounded to the compute dtype."""
        attention, mlp, dtype = self.self_attn, self.mlp, self.dtype
        q, k, v = (each.linear(dtype) for each in (attention.q_proj, attention.k_proj, attention.v_proj))
        heads = ((attention.q_norm, self.config.num_heads), (attention.k_norm, self.config.num_kv_heads))
        norms = [(norm, num) for norm, num in heads if norm is not None]
        return LayerWeights(
            attention_norm=self.input_layernorm.rounded(dtype),
            qk_v=Apart(((q, k), (v,))),
            o=attention.o_proj.linear(dtype),
            qk_norm=None if not norms else torch.cat([norm.rounded(dtype).expand(num, -1) for norm, num in norms]),
            mlp_norm=self.post_attention_layernorm.rounded(dtype),
            gate_up=Apart(((mlp.gate_proj.linear(dtype),), (mlp.up_proj.linear(dtype),))),
            down=mlp.down_proj.linear(dtype),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, cached: LayerWeights | None = None) -> Tensor:
        """[M, D] from x [M, D] and the positions' cos and sin [M, 1, d]; `cached` is what `weights` gave before."""
        c, eps, dtype, w = self.config, self.config.rms_eps, self.dtype, cached or self.weights()
        qk, v = w.qk_v(in_dtype(numerics.rms_norm(x, w.attention_norm, eps), dtype))
        qk = in_dtype(qk, torch.float32).view(-1, c.num_heads + c.num_kv_heads, c.head_dim)
        if w.qk_norm is not None:
            qk = numerics.rms_norm(qk, w.qk_norm, eps)
        if self.index not in c.unrotated:
            qk = numerics.rotate(qk, cos, sin)
        q, k = qk.split_with_sizes((c.num_heads, c.num_kv_heads), 1)
        k = in_dtype(in_dtype(k, dtype), torch.float32)
        x = x + w.o(in_dtype(attend(self.index, q, k, in_dtype(v, torch.float32)), dtype))
        gates, up = w.gate_up(in_dtype(numerics.rms_norm(x, w.mlp_norm, eps), dtype))
        return x + w.down(numerics.gate(gates, up, c.activation))


class _Model(nn.Module):
    def __init__(self, c: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Projection(c.hidden_size, c.vocab_size, False)
        self.layers = nn.ModuleList(_Layer(c, index, dtype) for index in range(c.num_layers))
        self.norm = _Norm(c.hidden_size, c.norm_offset)


# ------------------------------------------------------------------------------------------------------ the model


class Decoder(LanguageModel):
    """See the module's docstring. config: the shape; dtype: the compute dtype."""

    config: DecoderConfig
    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.config = config
        self.model = _Model(config, dtype)
        self.lm_head = None if config.tie_embeddings else Projection(config.hidden_size, config.vocab_size, False)
        places = partial(torch.arange, device="cpu")  # where only shapes are asked for, too: there torch would import its compiler
        frequencies = 1.0 / config.rope_theta ** (places(0, config.head_dim, 2).float() / config.head_dim)
        if config.stretched is not None:
            frequencies = config.stretched(frequencies)
        angles = (places(max(config.max_positions, QUERIES)).float()[:, None] * frequencies).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        self.register_buffer("cos", torch.cat([cos, cos], 1), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], 1), persistent=False)
        self._step = Replay(self._decoded)

    @classmethod
    def shaped(cls, config: DecoderConfig, dtype: torch.dtype) -> Decoder:
        return cls(config, dtype)

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def tied(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.model.layers)

    @property
    def pads(self) -> bool:
        return False

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """A layer sees nothing of a parameter but its value in the compute dtype."""
        return None if self.dtype == torch.float32 else self.dtype

    @property
    def output_weight(self) -> Tensor:
        """The embedding, where the two are tied."""
        return (self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight).to(self.dtype)

    def prefill(self, tokens: Tensor, cache: KVCache | None = None, slots: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, D] after the final norm of tokens [B, T] int64, causal from position 0.

        Right padding is inert. With a cache, keys and values of all T positions are written into `slots` [B] int64
        (the first B by default); without one the result is differentiable. Raises EngineError for rows that are too
        long for the model or the cache.
        """
        B, T = tokens.shape
        self._check(B, T, cache)
        rows = prefixes(tokens, torch.full((B,), T))
        with torch.set_grad_enabled(cache is None and torch.is_grad_enabled()):
            return F.embedding(rows.place, self._packed(rows, cache, slice(0, B) if slots is None else slots))

    def states_at(self, tokens: Tensor, lengths: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        self._check(len(tokens), int(lengths.max()), None)
        if not bool(lengths.any()):
            tokens, lengths = tokens.new_zeros(1, 1), torch.ones(1, dtype=torch.int64)
        rows = prefixes(tokens, lengths)
        return F.embedding(rows.place[at], self._packed(rows))

    def _packed(self, rows: Prefixes, cache: KVCache | None = None, slots: slice | Tensor = slice(0)) -> Tensor:
        """Hidden states [N, D]; keys and values of all rows go into these slots of the cache."""
        c, N = self.config, len(rows.tokens)
        K, G, d, M = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim, padded(N, PASS_ROWS)
        biases = [causal_bias(bucket, K, G) for bucket in rows.buckets]
        heads = torch.arange(K)[:, None]
        queries, keys = (
            [each[:, None] * K + heads for each in found]
            for found in zip(*((b.queries, b.keys) for b in rows.buckets), strict=True)
        )
        places = output_places(rows.buckets, M, K)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.reshape(M * K, G * d), k.reshape(M * K, d), v.reshape(M * K, d)
            if cache is not None:
                at = rows.place[:, None] * K + heads
                cache.fill(layer, slots, k[at], v[at])
            out = [
                numerics.attention(
                    F.embedding(at, q).view(-1, at.shape[2] * G, d),
                    F.embedding(window, k).flatten(0, 1),
                    F.embedding(window, v).flatten(0, 1),
                    bias,
                ).view(-1, G * d)
                for at, window, bias in zip(queries, keys, biases, strict=True)
            ]
            return F.embedding(places, torch.cat(out)).view(M, -1)

        weights = None if cache is None else self._cached(cache).tree
        return self._forward(F.pad(rows.tokens, (0, M - N)), F.pad(rows.positions, (0, M - N)), weights, attend)[:N]

    @torch.no_grad()
    def extend(self, tokens: Tensor, lengths: Tensor, cache: KVCache, slots: Tensor, first: Tensor) -> Tensor:
        """Hidden states [B, D] after the final norm of the last tokens of rows that go on: what `prefill` of the whole gives.

        tokens: the new ones [B, T] int64, padded on the right with any token, of which `lengths` [B], at least one, count; slots
        [B]: where rows lie; first [B]: how many tokens of each the cache has. Raises EngineError for a row that is too long.
        """
        c, K, d = self.config, self.config.num_kv_heads, self.config.head_dim
        (B, T), H, G, new = tokens.shape, c.num_heads, c.num_heads // K, int(lengths.sum())
        longest = int((first + lengths).max())
        self._check(B, longest, cache)
        Q, W, M = max(T, QUERIES), padded(longest, KEYS), padded(new, PASS_ROWS)
        row, time = torch.nonzero(torch.arange(T) < lengths[:, None], as_tuple=True)
        place, position = slots[row], first[row] + time
        ahead = torch.arange(W) > (first[:, None] + torch.arange(Q))[..., None]
        bias = torch.zeros(B, Q, W).masked_fill_(ahead, float("-inf")).repeat_interleave(G, 1).repeat_interleave(K, 0)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, place, position, k[:new], v[:new].view(new, K, d))
            asked = torch.zeros(B, Q, H, d).index_put_((row, time), numerics.scaled(q[:new].view(new, H, d)))
            asked = asked.view(B, Q, K, G, d).permute(0, 2, 1, 3, 4).reshape(B * K, Q * G, d)
            out = numerics.attended(asked, *cache.read(layer, slots, W), bias)
            return F.pad(out.view(B, K, Q, G, d)[row, :, time].view(new, H * d), (0, 0, 0, M - new))

        given = F.pad(tokens[row, time], (0, M - new)), F.pad(position, (0, M - new))
        return self._forward(*given, self._cached(cache).tree, attend)[lengths.cumsum(0) - 1]

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Hidden states [S, D] after the final norm of one token a row, where row i is in slot i of the cache.

        tokens and positions: int64 [S]. Writes keys and values at each row's position and attends to 0..position; windows are
        cut to the longest row, or in two parts to that of each (`window_cut`). Raises EngineError for a row that is too long
        for the model or the cache.
        """
        S, at = tokens.shape[0], positions.numpy()
        self._check(S, int(at.max()) + 1, cache)
        slots = np.arange(S)
        if missing := padded(S, ROWS) - S:
            tokens, at = F.pad(tokens, (0, missing)), np.pad(at, (0, missing))
            positions, slots = torch.from_numpy(at), np.append(slots, np.arange(missing) + cache.slots)
        cut, _ = window_cut(at)
        parts = (slice(cut), slice(cut, len(at))) if cut else (slice(len(at)),)
        windows = [cache.window(rows, at[rows]) for rows in parts]
        given = [tokens, positions, *cache.places(slots, at), *chain.from_iterable(windows)]
        sizes = [window[0].shape[2] for window in windows]
        facts = numerics.choices(len(at), self.config.intermediate_size, sizes, self.dtype)
        return self._step(facts, given, self._cached(cache))[:S]

    def _decoded(self, given: Sequence[Tensor], weights: Weights) -> Tensor:
        """`decode` of a number of rows that products like: given what it gives, hidden states [M, D]."""
        c, L = self.config, self.config.num_layers
        K, d = c.num_kv_heads, c.head_dim
        G = c.num_heads // K
        tokens, positions, key_places, value_places = given[:4]
        keys, values = given[4 : 4 + L], given[4 + L : 4 + 2 * L]
        windows = [given[at : at + 1 + 2 * L] for at in range(4 + 2 * L, len(given), 1 + 2 * L)]
        room = torch.zeros(tokens.shape[0], K, max(G, QUERIES), d)  # queries, and zeros for those that a product would miss
        own, asked = room.narrow(2, 0, G), room.flatten(0, 1).split_with_sizes([window[0].shape[0] for window in windows])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer].put_(key_places, in_dtype(k, keys[layer].dtype))
            values[layer].index_copy_(0, value_places, in_dtype(v.reshape(-1, d), values[layer].dtype))
            numerics.scaled(q.view(-1, K, G, d), own)
            found = [
                numerics.attended(
                    queries,
                    in_dtype(window[1 + layer], torch.float32),
                    in_dtype(window[1 + L + layer], torch.float32),
                    window[0],
                )
                for queries, window in zip(asked, windows, strict=True)
            ]
            out = found[0] if len(found) == 1 else torch.cat(found)
            return out.view(-1, K, max(G, QUERIES), d).narrow(2, 0, G).reshape(-1, K * G * d)

        return self._forward(tokens, positions, weights, attend)

    def _cached(self, cache: KVCache) -> Leaves[Weights]:
        if cache.weights is None:
            layers = [layer.weights().joined() for layer in cast("list[_Layer]", list(self.model.layers))]
            norm = self.model.norm.rounded(torch.float32)
            cache.weights = Leaves(Weights(self.model.embed_tokens.weight.detach(), layers, norm.detach()))
        return cache.weights

    def _forward(self, tokens: Tensor, positions: Tensor, cached: Weights | None, attend: Attend) -> Tensor:
        """All layers and the final norm, [M, D], for tokens and positions int64 [M]."""
        layers = cast("list[_Layer]", list(self.model.layers))
        weights = cached or Weights(self.model.embed_tokens.weight, [None] * len(layers), self.model.norm.rounded(torch.float32))
        cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in (self.cos, self.sin))
        x = F.embedding(tokens, weights.embedding)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        again = self.recompute and torch.is_grad_enabled()
        for layer, of_layer in zip(layers, weights.layers, strict=True):
            if again:
                x = cast(
                    "Tensor",
                    torch.utils.checkpoint.checkpoint(layer, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False),
                )
            else:
                x = layer(x, cos, sin, attend, of_layer)
        return in_dtype(numerics.rms_norm(x, weights.norm, self.config.rms_eps), self.dtype)

    def _check(self, rows: int, length: int, cache: KVCache | None) -> None:
        if length > self.config.max_positions:
            raise EngineError(f"a row of {length} tokens is longer than the model's {self.config.max_positions} positions")
        if cache is not None and (length > cache.capacity or rows > cache.slots):
            raise EngineError(f"{rows} rows of {length} tokens do not fit a cache of {cache.slots} slots of {cache.capacity}")


def init_decoder(config: DecoderConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder with random weights from `seed` alone: matrices normal with deviation 0.02, biases 0, norms 1."""
    decoder = Decoder(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
    return decoder
