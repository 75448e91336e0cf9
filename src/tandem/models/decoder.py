"""The decoder that training and native rollout share: one definition, two ways through it.

`Decoder.prefill` reads whole rows at once, `Decoder.decode` one token a row against a `KVCache`; both run the same
block on [M, D] rows through `numerics`. Grouped-query attention, rotary positions, RMS norm, gated MLP, tied or untied
embeddings, optional biases and norms of queries and keys: what Llama, Qwen2 and Qwen3 are. Parameters are float32 and
have their Hugging Face names; products run in the compute dtype. It does not sample and has no output layer: heads.py
turns hidden states into log-probabilities.

Legend: B rows, T padded time, S decode rows, M rows of a product (a multiple of numerics.ROWS), D width, H heads,
K key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.errors import EngineError
from tandem.models import numerics

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. `attention_bias` is of the q, k and v projections, `output_bias` of the o projection."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 2048

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        for name in ("rope_theta", "rms_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class KVCache:
    """Keys and values of `slots` rows of up to `capacity` tokens; position p of a row is column p of its slot."""

    def __init__(self, config: DecoderConfig, slots: int, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        self.slots, self.capacity = slots, capacity
        shape = (config.num_layers, slots, config.num_kv_heads, numerics.padded(capacity, numerics.KEYS), config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies the first `length` positions of slots `source` [n] int64 to slots `target` [n] int64."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]


class _Projection(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        return numerics.linear(x, weight, bias)


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return numerics.rms_norm(x, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c = config
        self.q_proj = _Projection(c.hidden_size, c.num_heads * c.head_dim, c.attention_bias)
        self.k_proj = _Projection(c.hidden_size, c.num_kv_heads * c.head_dim, c.attention_bias)
        self.v_proj = _Projection(c.hidden_size, c.num_kv_heads * c.head_dim, c.attention_bias)
        self.o_proj = _Projection(c.num_heads * c.head_dim, c.hidden_size, c.output_bias)
        self.q_norm = _Norm(c.head_dim, c.rms_eps) if c.qk_norm else None
        self.k_norm = _Norm(c.head_dim, c.rms_eps) if c.qk_norm else None


class _MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = _Projection(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = _Projection(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = _Projection(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(numerics.gate(self.gate_proj(x), self.up_proj(x)))


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, config.rms_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_eps)
        self.mlp = _MLP(config)


class _Trunk(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = _Norm(config.hidden_size, config.rms_eps)


class Decoder(nn.Module):
    """See the module's docstring. config: the shape; dtype: of products and hidden states (parameters stay float32)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = _Trunk(config)
        self.lm_head = None if config.tie_embeddings else _Projection(config.hidden_size, config.vocab_size, False)
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.arange(config.max_positions).float()[:, None] * (1.0 / config.rope_theta**half)
        cos, sin = angles.double().cos().float(), angles.double().sin().float()
        self.register_buffer("cos", torch.cat([cos, cos], 1), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], 1), persistent=False)

    @property
    def output_weight(self) -> Tensor:
        """[V, D] float32: the output layer, which is the embedding where the two are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def prefill(self, tokens: Tensor, cache: KVCache | None = None, slots: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, D] after the final norm of tokens [B, T] int64, causal from position 0.

        Right padding is inert. With a cache, keys and values of all T positions are written into `slots` [B] int64
        (the first B by default); without one the result is differentiable.
        """
        c, (B, T) = self.config, tokens.shape
        self._check(T - 1, cache)
        W = numerics.padded(T, numerics.KEYS)
        group = c.num_heads // c.num_kv_heads
        columns = torch.arange(W)
        bias = torch.zeros(W, W).masked_fill_(columns > columns[:, None], float("-inf")).repeat_interleave(group, 0)[None]
        rows = slice(0, B) if slots is None else slots

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = q.view(B, W, c.num_kv_heads, group, c.head_dim).transpose(1, 2).reshape(B * c.num_kv_heads, W * group, c.head_dim)
            k, v = (x.view(B, W, c.num_kv_heads, c.head_dim).transpose(1, 2) for x in (k, v))
            if cache is not None:
                cache.keys[layer, rows, :, :T], cache.values[layer, rows, :, :T] = k[:, :, :T], v[:, :, :T]
            out = numerics.attention(q, k.reshape(-1, W, c.head_dim), v.reshape(-1, W, c.head_dim), bias)
            return out.view(B, c.num_kv_heads, W, group, c.head_dim).transpose(1, 2).reshape(B * W, c.num_heads * c.head_dim)

        x = self._blocks(F.pad(tokens, (0, W - T)).flatten(), columns.repeat(B), attend)
        return x.view(B, W, c.hidden_size)[:, :T]

    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Hidden states [S, D] after the final norm of one token a row: row i is in slot i of the cache.

        tokens and positions: int64 [S]. Writes keys and values at each row's position and attends to 0..position;
        the window is cut to the longest row.
        """
        c, S = self.config, tokens.shape[0]
        longest = int(positions.max())
        self._check(longest, cache)
        W, M = numerics.padded(longest + 1, numerics.KEYS), numerics.padded(S)
        K, group, capacity = c.num_kv_heads, c.num_heads // c.num_kv_heads, cache.keys.shape[3]
        bias = torch.zeros(S, W).masked_fill_(torch.arange(W) > positions[:, None], float("-inf"))
        bias = bias[:, None].expand(S, K * group, W).reshape(S * K, group, W)
        places = (torch.arange(S * K).view(S, K) * capacity + positions[:, None]).flatten()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys.view(-1, c.head_dim).index_copy_(0, places, k[:S].reshape(-1, c.head_dim))
            values.view(-1, c.head_dim).index_copy_(0, places, v[:S].reshape(-1, c.head_dim))
            keys, values = (x.view(-1, capacity, c.head_dim)[: S * K, :W] for x in (keys, values))
            out = numerics.attention(q[:S].reshape(S * K, group, c.head_dim), keys, values, bias)
            return F.pad(out.reshape(S, c.num_heads * c.head_dim), (0, 0, 0, M - S))

        return self._blocks(F.pad(tokens, (0, M - S)), F.pad(positions, (0, M - S)), attend)[:S]

    def _blocks(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All layers and the final norm on rows: tokens and positions int64 [M]; gives [M, D]."""
        c, M = self.config, tokens.shape[0]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        scale = c.head_dim**-0.5
        x = F.embedding(tokens, self.model.embed_tokens.weight)
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, _Layer)
            att = layer.self_attn
            h = layer.input_layernorm(x).to(self.dtype)
            q, k = att.q_proj(h).view(M, c.num_heads, c.head_dim), att.k_proj(h).view(M, c.num_kv_heads, c.head_dim)
            if att.q_norm is not None and att.k_norm is not None:
                q, k = att.q_norm(q), att.k_norm(k)
            q, k = numerics.rotate(q, cos * scale, sin * scale).to(self.dtype), numerics.rotate(k, cos, sin).to(self.dtype)
            x = x + att.o_proj(attend(index, q, k, att.v_proj(h)))
            x = x + layer.mlp(layer.post_attention_layernorm(x).to(self.dtype))
        return self.model.norm(x).to(self.dtype)

    def _check(self, position: int, cache: KVCache | None) -> None:
        limit = self.config.max_positions if cache is None else min(cache.capacity, self.config.max_positions)
        if position >= limit:
            raise EngineError(
                f"position {position} is past the end: the model has {self.config.max_positions} positions"
                + ("" if cache is None else f" and the cache {cache.capacity}")
            )


def init_decoder(config: DecoderConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder with random weights from `seed` alone: matrices normal with deviation 0.02, biases 0, norms 1."""
    decoder = Decoder(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
    return decoder
