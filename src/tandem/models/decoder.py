"""The decoder that training and native rollout share: one definition, two ways through it.

`Decoder.prefill` reads whole rows at once, `Decoder.decode` one token a row against a `KVCache`; both run the same
layers on [M, D] rows through `numerics`. Grouped-query attention, rotary positions, RMS norm, gated MLP, tied or untied
embeddings, and what a family adds to that by configuration: Llama, Mistral, Qwen2, Qwen3, Gemma, SmolLM. It does not sample, it
has no output layer (heads.py turns hidden states into log-probabilities), and it runs on the CPU.

Parameters are float32 and have their Hugging Face names. A layer sees all of its own rounded to the compute dtype, so that
a sharded layer can be gathered in that dtype and be the same. Products with weights run in the compute dtype, all else
(residual stream, norms, positions, attention) in float32. Each layer is called as a module: what hooks into modules works.

Legend: B rows, T padded time, S decode rows, W window of keys, M rows of a product (B * T or S, padded to a multiple of
numerics.ROWS), D width, H heads, K key-value heads, G = H / K, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tandem.errors import EngineError
from tandem.models import numerics
from tandem.models.language_model import LanguageModel
from tandem.models.numerics import KEYS, QUERIES, ROWS, padded
from tandem.models.prefixes import Bucket, Prefixes, prefixes


@dataclass(frozen=True)
class StretchedRope:
    """Llama 3's way to longer contexts: frequencies of long waves are divided by `factor`.

    A wave of more than original_positions / low_factor positions is long, one of fewer than original_positions / high_factor
    stays as it is, and what is between is in between.
    """

    factor: float
    low_factor: float
    high_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low_factor < self.high_factor and self.original_positions >= 1):
            raise ValueError(f"rotary positions cannot be stretched by {self}")

    def __call__(self, frequencies: Tensor) -> Tensor:
        waves = 2 * math.pi / frequencies
        share = (self.original_positions / waves - self.low_factor) / (self.high_factor - self.low_factor)
        between = (1 - share) * frequencies / self.factor + share * frequencies
        found = torch.where(waves > self.original_positions / self.low_factor, frequencies / self.factor, between)
        return torch.where(waves < self.original_positions / self.high_factor, frequencies, found)


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    attention_bias: on the q, k and v projections; output_bias: on the o projection; mlp_bias: on all three of the MLP;
    qk_norm: RMS norm of each head's queries and keys; max_positions: tokens of the longest row. activation: of the MLP's gate;
    norm_offset: added to the weights of norms; embedding_scale: times the embedding, where it is the input; unrotated: layers
    without rotary positions.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    stretched: StretchedRope | None = None
    unrotated: tuple[int, ...] = ()
    rms_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: numerics.Activation = "silu"
    embedding_scale: float = 1.0
    tie_embeddings: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 2048

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        for name in ("rope_theta", "rms_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


# ---------------------------------------------------------------------------------- what a forward computes with


class Linear(NamedTuple):
    """A projection in the compute dtype."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return numerics.linear(x, self.weight, self.bias)


Product = Callable[[Tensor], Tensor]  # [M, inputs] -> [M, outputs]: a Linear, or one with an adapter


class LayerWeights(NamedTuple):
    """One layer: projections in the compute dtype; norms in float32, rounded to it."""

    attention_norm: Tensor
    q: Product
    k: Product
    v: Product
    o: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    gate: Product
    up: Product
    down: Product


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
        return Linear(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


class _Norm(nn.Module):
    def __init__(self, size: int, offset: float) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.full((size,), 1 - offset))

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """What a norm multiplies with, in float32: the weight, of values that `dtype` holds, and the offset."""
        weight = self.weight.to(dtype).float()
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
        return LayerWeights(
            attention_norm=self.input_layernorm.rounded(dtype),
            q=attention.q_proj.linear(dtype),
            k=attention.k_proj.linear(dtype),
            v=attention.v_proj.linear(dtype),
            o=attention.o_proj.linear(dtype),
            q_norm=None if attention.q_norm is None else attention.q_norm.rounded(dtype),
            k_norm=None if attention.k_norm is None else attention.k_norm.rounded(dtype),
            mlp_norm=self.post_attention_layernorm.rounded(dtype),
            gate=mlp.gate_proj.linear(dtype),
            up=mlp.up_proj.linear(dtype),
            down=mlp.down_proj.linear(dtype),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, cached: LayerWeights | None = None) -> Tensor:
        """[M, D] from x [M, D] and the positions' cos and sin [M, 1, d]; `cached` is what `weights` gave before."""
        c, M, eps, dtype, w = self.config, x.shape[0], self.config.rms_eps, self.dtype, cached or self.weights()
        h = numerics.rms_norm(x, w.attention_norm, eps).to(dtype)
        q, k = w.q(h).float().view(M, c.num_heads, c.head_dim), w.k(h).float().view(M, c.num_kv_heads, c.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = numerics.rms_norm(q, w.q_norm, eps), numerics.rms_norm(k, w.k_norm, eps)
        if self.index not in c.unrotated:
            q, k = numerics.rotate(q, cos, sin), numerics.rotate(k, cos, sin)
        x = x + w.o(attend(self.index, q, k.to(dtype).float(), w.v(h).float()).to(dtype))
        h = numerics.rms_norm(x, w.mlp_norm, eps).to(dtype)
        return x + w.down(numerics.gate(w.gate(h), w.up(h), c.activation))


class _Model(nn.Module):
    def __init__(self, c: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Projection(c.hidden_size, c.vocab_size, False)
        self.layers = nn.ModuleList(_Layer(c, index, dtype) for index in range(c.num_layers))
        self.norm = _Norm(c.hidden_size, c.norm_offset)


class KVCache:
    """Keys and values of `slots` rows of up to `capacity` tokens: position p of a row is column p of its slot.

    It belongs to the weights that fill it, whose copies in the compute dtype it keeps too: when weights change, make a new
    one. dtype: float32 is the fastest; the decoder's compute dtype holds the same values, since they are rounded to it.
    """

    def __init__(self, config: DecoderConfig, slots: int, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        self.slots, self.capacity = slots, capacity
        shape = (config.num_layers, slots, config.num_kv_heads, padded(capacity, KEYS), config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
        self.layers: list[LayerWeights] | None = None
        self.output: Tensor | None = None

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies the first `length` positions of slots `source` [n] int64 to slots `target` [n] int64."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]


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
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        if config.stretched is not None:
            frequencies = config.stretched(frequencies)
        angles = (torch.arange(max(config.max_positions, QUERIES)).float()[:, None] * frequencies).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        self.register_buffer("cos", torch.cat([cos, cos], 1), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], 1), persistent=False)

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
        K, G, d, M = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim, padded(N, ROWS)
        biases = [_causal(bucket, K, G) for bucket in rows.buckets]
        heads = torch.arange(K)[:, None]
        queries, keys = (
            [each[:, None] * K + heads for each in found]
            for found in zip(*((b.queries, b.keys) for b in rows.buckets), strict=True)
        )
        origin = _origin(rows.buckets, M, K)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.reshape(M * K, G * d), k.reshape(M * K, d), v.reshape(M * K, d)
            if cache is not None:
                for kept, new in ((cache.keys, k), (cache.values, v)):
                    kept[layer, slots, :, : rows.place.shape[1]] = new[rows.place[:, None] * K + heads].to(kept.dtype)
            out = [
                numerics.attention(
                    F.embedding(at, q).view(-1, at.shape[2] * G, d),
                    F.embedding(window, k).flatten(0, 1),
                    F.embedding(window, v).flatten(0, 1),
                    bias,
                ).view(-1, G * d)
                for at, window, bias in zip(queries, keys, biases, strict=True)
            ]
            return F.embedding(origin, torch.cat(out)).view(M, -1)

        return self._forward(F.pad(rows.tokens, (0, M - N)), F.pad(rows.positions, (0, M - N)), cache, attend)[:N]

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Hidden states [S, D] after the final norm of one token a row, where row i is in slot i of the cache.

        tokens and positions: int64 [S]. Writes keys and values at each row's position and attends to 0..position;
        the window is cut to the longest row. Raises EngineError for a row that is too long for the model or the cache.
        """
        c, S = self.config, tokens.shape[0]
        length = int(positions.max()) + 1
        self._check(S, length, cache)
        K, G, d, columns = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim, cache.keys.shape[3]
        W, M = padded(length, KEYS), padded(S, ROWS)
        bias = torch.zeros(S, W).masked_fill_(torch.arange(W) > positions[:, None], float("-inf"))
        bias = bias.repeat_interleave(K, 0)[:, None]
        places = (torch.arange(0, S * K * columns, columns).view(S, K) + positions[:, None]).flatten()

        def window(cached: Tensor, new: Tensor) -> Tensor:
            cached.view(-1, d).index_copy_(0, places, new[:S].reshape(-1, d).to(cached.dtype))
            return cached.view(-1, columns, d)[: S * K, :W].float()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = window(cache.keys[layer], k), window(cache.values[layer], v)
            out = numerics.attention(q[:S].view(S * K, G, d), k, v, bias)
            return F.pad(out.reshape(S, -1), (0, 0, 0, M - S))

        return self._forward(F.pad(tokens, (0, M - S)), F.pad(positions, (0, M - S)), cache, attend)[:S]

    def _forward(self, tokens: Tensor, positions: Tensor, cache: KVCache | None, attend: Attend) -> Tensor:
        """All layers and the final norm, [M, D], for tokens and positions int64 [M]."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = F.embedding(tokens, self.model.embed_tokens.weight)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        layers = cast("list[_Layer]", list(self.model.layers))
        weights: Sequence[LayerWeights | None] = [None] * len(layers)
        if cache is not None:
            weights = cache.layers = cache.layers or [layer.weights() for layer in layers]
        again = self.recompute and torch.is_grad_enabled()
        for layer, cached in zip(layers, weights, strict=True):
            if again:
                x = cast(
                    "Tensor",
                    torch.utils.checkpoint.checkpoint(layer, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False),
                )
            else:
                x = layer(x, cos, sin, attend, cached)
        return numerics.rms_norm(x, self.model.norm.rounded(torch.float32), self.config.rms_eps).to(self.dtype)

    def _check(self, rows: int, length: int, cache: KVCache | None) -> None:
        if length > self.config.max_positions:
            raise EngineError(f"a row of {length} tokens is longer than the model's {self.config.max_positions} positions")
        if cache is not None and (length > cache.capacity or rows > cache.slots):
            raise EngineError(f"{rows} rows of {length} tokens do not fit a cache of {cache.slots} slots of {cache.capacity}")


def _causal(bucket: Bucket, K: int, G: int) -> Tensor:
    """Bias of 0 and -inf that hides from a query what comes after it: [S * K, Q * G, W], with 1 for S * K if all begin alike."""
    first = bucket.first[:1] if bool((bucket.first == bucket.first[0]).all()) else bucket.first
    (Q, W), S = (bucket.queries.shape[1], bucket.keys.shape[1]), len(first)
    ahead = torch.arange(W) > (first[:, None] + torch.arange(Q))[..., None]
    bias = torch.zeros(S, Q, W).masked_fill_(ahead, float("-inf")).repeat_interleave(G, 1)
    return bias if S == 1 else bias.repeat_interleave(K, 0)


def _origin(buckets: Sequence[Bucket], M: int, K: int) -> Tensor:
    """Where among the outputs of all buckets, [S, K, Q] each, head k of packed token m is: [M, K]."""
    found, before = torch.zeros(M, K, dtype=torch.int64), 0
    for bucket in buckets:
        S, Q = bucket.queries.shape
        segment, query = bucket.place // Q, bucket.place % Q
        found[bucket.token] = before + (segment[:, None] * K + torch.arange(K)) * Q + query[:, None]
        before += S * K * Q
    return found


def init_decoder(config: DecoderConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder with random weights from `seed` alone: matrices normal with deviation 0.02, biases 0, norms 1."""
    decoder = Decoder(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
    return decoder
