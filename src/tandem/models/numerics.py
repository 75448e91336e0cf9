"""Every product and softmax of model code, in forms whose bits for a row do not depend on what stands beside it.

Training scores a whole batch at once, generation one token a row among changing companions. Both call these
functions, so their log-probabilities are equal bit for bit wherever the start-up probe (probe.py) finds that this
machine's kernels keep to the rules below. It is not a kernel library: everything is plain torch.

A kernel sums each output over its inner dimension in some order, and picks that order by the shapes it is given and
by the threads it may use. The rules give it no choice (CPU, torch 2.13; `linear` and `attention` apply them):

1. Products with weights are oneDNN's, which gives a row the same bits in any company of at least ROWS rows, for any inner
   dimension, with any weights above or below, packed or not, on any number of threads. BLAS does not: it has other kernels for
   few rows and for few outputs, and splits long inner dimensions at places that depend on both. But with a weight that lies turned
   and has at most IN_ORDER inputs it gives oneDNN's bits, where its kernels are those for AVX-512, in a tenth of the time that
   oneDNN takes to begin: `packed` tries whether it does. Where torch has no
   oneDNN for a dtype, BLAS it is, and the probe says what that is worth. A processor that does not multiply in bfloat16 does it in
   float32 and rounds the result. In bfloat16 on a processor with AMX, oneDNN sums in one order up to AMX_ROWS, in another above,
   and, by shape, again in the first from many rows on. There a product is made of parts of AMX_ROWS; but one of more than AMX_MANY
   is filled up to a multiple of AMX_STEP, and made at once, where that gives the bits of parts: it is tried, once a shape.
2. Products of a backward pass promise no bits: those for a gradient of weights are of BLAS, those for one of inputs, too, where its
   kernels are those for AVX-512, else oneDNN's.
3. A window of keys starts at column 0 of its row and is a multiple of KEYS long: P V blocks its keys from the first
   column on, and short windows take other kernels. P V is summed in tiles of TILE keys, in order, the last one cut.
4. A product with keys has at least QUERIES rows of queries (grouped heads leave fewer in a decode step), and its inner
   dimension, the head size, is summed in tiles of HEAD, since small problems of larger heads take other kernels. The
   scale is multiplied into the queries: some kernels would apply it before the sum and some after. Keys lie in memory as the
   product reads them, which is faster and the same bits.
5. Attention is in float32 whatever the products' dtype: with the window cut at a multiple of KEYS, bfloat16 flips
   roundings. Softmax is explicit; masked columns are -inf, so they weigh exactly 0 and add nothing to a sum.
6. Element-wise code is add, sub, mul, div and sqrt, which round correctly, so that scalar and vector code agree.
   `exp` and `tanh` do not, and vector code goes on by two vectors: what is left of a tensor, or of the piece of it that a thread
   gets, runs scalar code. `gate` has nothing left.

Backward passes are plain: gradients promise no bits.

Legend: M rows (tokens, padded), N attention problems (row x key-value head), Q queries of one, W keys of one, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 2
AMX_ROWS = 32  # of a product in bfloat16 on a processor with AMX: as many as two of its tiles hold
AMX_MANY, AMX_STEP = 512, 256  # rows of such a product that is made at once
KEYS = 16
TILE = 128
QUERIES = 4
HEAD = 64
IN_ORDER = 384  # numbers that BLAS adds up one after the other where it does so at all; it adds up longer rows in parts
PACKED = 64  # rows that packed weights are best for; for others they are hardly worse
GRAIN = 32_768  # elements that torch leaves to one thread
GELU_ALONE = 16_384  # elements of GELU that torch leaves to one thread: above 20,480 it shares them among all
STEP_BYTES = 128  # that vector code goes on by: two vectors of 512 bits
HALVES = 128  # elements that are whole steps of vector code (two vectors of 512 bits, bfloat16 the most) for each of two threads

Activation = Literal["silu", "gelu_tanh"]


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple; at least one of it."""
    return max(-(-count // multiple), 1) * multiple


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in this dtype, and where it is in it no operation at all: a record of a decode step would have one."""
    return x if x.dtype == dtype else x.to(dtype)


def choices(rows: int, width: int, windows: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """What decides which operations the functions here run without gradient: they are the same where this is equal.

    rows: of products in `dtype`, and of `gate`, whose width this is; windows: of keys, to which attention gives queries.
    """
    threads = torch.get_num_threads()
    parts = 1 if dtype != torch.bfloat16 else rows if rows > AMX_MANY else -(-rows // AMX_ROWS)
    tiles = (-(-window // TILE) for window in windows)
    return (threads, parts, -rows * width % _steps(dtype), rows if threads > 2 else 0, *tiles)


# ---------------------------------------------------------------------------------------------------- products


class Packed(NamedTuple):
    """A copy of a weight in an order that spares a product work. turned: [in, out], for a product of BLAS."""

    weight: Tensor
    turned: bool


def linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """Gives x weight^T + bias: x [M, in], weight [out, in], bias [out], all of one dtype; M a multiple of ROWS.

    Differentiable, but for a weight that is packed.
    """
    assert x.shape[0] % ROWS == 0, f"{x.shape[0]} rows are no multiple of {ROWS}"
    if torch.is_grad_enabled() and not isinstance(weight, Packed) and (x.requires_grad or weight.requires_grad):
        return cast("Tensor", _Linear.apply(x, weight, bias))
    return _linear(x, weight, bias)


def packed(weight: Tensor) -> Packed:
    """For `linear`, again and again and without gradient."""
    weight = weight.detach().to(_multiplied(weight.dtype))
    if weight.dtype == torch.float32 and _sums_in_order(weight.shape[1]):
        return Packed(weight.t().contiguous(), True)
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight, PACKED) if _onednn(weight.dtype) else weight, False)


@cache
def _sums_in_order(inner: int) -> bool:
    """Whether BLAS gives products in float32 with a turned weight the bits that oneDNN gives them: it is tried."""
    if not 1 < inner <= IN_ORDER or _onednn(torch.float32) is None:
        return False
    seeded = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=seeded) for size in ((66, inner), (613, inner), (613,)))
    return all(
        torch.equal(
            torch.addmm(bias[:outputs], part, weight[:outputs].t().contiguous()), _linear(part, weight[:outputs], bias[:outputs])
        )
        for part in (x[:2], x[:6], x[:16], x)
        for outputs in (16, 320, 613)
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """Gives a [M, K] times b [K, N] for backward passes: no promise about bits.

    torch's own product reads a matrix that is turned without a copy of it, as `a` is for a gradient of weights. In bfloat16 it is
    oneDNN's, in float32 that of BLAS, which else is as fast only where its kernels are those for AVX-512: where it sums in order.
    """
    wide = _multiplied(a.dtype)
    if wide == torch.bfloat16 or a.stride(0) == 1 or _sums_in_order(IN_ORDER):
        return in_dtype(in_dtype(a, wide) @ in_dtype(b, wide), a.dtype)
    return _linear(a, b.t(), None)


def _linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None) -> Tensor:
    if (wide := _multiplied(x.dtype)) != x.dtype:
        weight = weight if isinstance(weight, Packed) else weight.to(wide)
        return _linear(x.to(wide), weight, None if bias is None else bias.to(wide)).to(x.dtype)
    if isinstance(weight, Packed):
        if weight.turned:
            return torch.mm(x, weight.weight) if bias is None else torch.addmm(bias, x, weight.weight)
        weight = weight.weight
    onednn = _onednn(x.dtype)
    if onednn is None:
        return F.linear(x, weight, bias)
    if x.dtype == torch.bfloat16 and x.shape[0] > AMX_ROWS and _amx():
        rows, many = x.shape[0], padded(x.shape[0], AMX_STEP)
        if rows > AMX_MANY and _sums_as_parts(many, *weight.shape, weight.is_mkldnn, torch.get_num_threads()):
            return onednn(F.pad(x, (0, 0, 0, many - rows)) if many > rows else x, weight, bias)[:rows]
        parts = cast("tuple[Tensor, ...]", x.split(AMX_ROWS))
        return torch.cat([onednn(part, weight, bias) for part in parts])
    return onednn(x, weight, bias)


@cache
def _sums_as_parts(rows: int, outputs: int, inner: int, is_packed: bool, num_threads: int) -> bool:
    """Whether a product of so many rows in bfloat16 has the bits of its parts: it is tried, with the threads that there are."""
    del num_threads
    onednn, seeded = _onednn(torch.bfloat16), torch.Generator().manual_seed(0)
    assert onednn is not None
    x, weight = (torch.randn(size, inner, generator=seeded).bfloat16() for size in (rows, outputs))
    if is_packed:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED)
    parts = cast("tuple[Tensor, ...]", x.split(AMX_ROWS))
    return torch.equal(onednn(x, weight, None), torch.cat([onednn(part, weight, None) for part in parts]))


@cache
def _multiplied(dtype: torch.dtype) -> torch.dtype:
    """What numbers of this dtype are multiplied in: their own, or float32 for bfloat16 where the processor has no such products."""
    emulated = dtype == torch.bfloat16 and _onednn(dtype) is None and _onednn(torch.float32) is not None
    return torch.float32 if emulated else dtype


@cache
def _amx() -> bool:
    return torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]


@cache
def _onednn(dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The product of oneDNN, if it multiplies matrices of this dtype on this machine."""
    if not torch.backends.mkldnn.is_available():
        return None
    knows = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.jit.CompilationUnit(_PRODUCT).product if knows else None


# As torch's own program, since its recorder (replay.py) takes an empty list from no other.
_PRODUCT = """
def product(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
"""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight), (for_x, for_weight, for_bias) = grads, ctx.saved_tensors, ctx.needs_input_grad
        return (
            product(grad, weight) if for_x else None,
            product(grad.t(), x) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )


# --------------------------------------------------------------------------------------------------- attention


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v: float32 [N, Q, d], differentiable in q, k and v.

    q [N, Q, d], k and v [N, W, d] with W a multiple of KEYS; bias of 0 and -inf, broadcast to [N, Q, W]. All float32.
    """
    queries = q.shape[1]
    if queries < QUERIES:
        q = F.pad(q, (0, 0, 0, QUERIES - queries))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out = cast("Tensor", _Attention.apply(q, k, v, bias))
    else:
        out = attended(scaled(q), turned(k), v, bias)
    return out if queries >= QUERIES else out[:, :queries]


def scaled(q: Tensor, out: Tensor | None = None) -> Tensor:
    """Gives q / sqrt(d), for `attended`, in `out` if that is there."""
    return torch.mul(q, _scalar(int(q.shape[-1]) ** -0.5), out=out)


def turned(k: Tensor) -> Tensor:
    """A copy of keys [N, W, d] for `attended`: [N, d, W]."""
    return k.transpose(1, 2).contiguous()


def attended(q: Tensor, keys: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """`attention` without gradient, of queries that are `scaled` and at least QUERIES, and of keys that are `turned`."""
    return attention_values(attention_weights(q, keys, bias), v)


def attention_weights(q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """softmax(q keys + bias) over the keys, of what `attended` takes: [N, Q, W]."""
    assert keys.shape[2] % KEYS == 0, f"{keys.shape[2]} keys are no multiple of {KEYS}"
    if q.shape[2] <= HEAD:
        return torch.softmax(torch.baddbmm(bias, q, keys), -1)
    scores = torch.baddbmm(bias, q[:, :, :HEAD], keys[:, :HEAD])
    for start in range(HEAD, q.shape[2], HEAD):
        scores.baddbmm_(q[:, :, start : start + HEAD], keys[:, start : start + HEAD])
    return torch.softmax(scores, -1)


def attention_values(p: Tensor, v: Tensor) -> Tensor:
    """Gives p [N, Q, W] times v [N, W, d]."""
    if p.shape[2] <= TILE:
        return torch.bmm(p, v)
    out = torch.bmm(p[:, :, :TILE], v[:, :TILE])
    for start in range(TILE, p.shape[2], TILE):
        out.baddbmm_(p[:, :, start : start + TILE], v[:, start : start + TILE])
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        p = attention_weights(scaled(q), turned(k), bias)
        out = attention_values(p, v)
        ctx.save_for_backward(q, k, v, p, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, v, p, out) = grads, ctx.saved_tensors
        grad_v = torch.bmm(p.transpose(1, 2), grad)
        scores = torch.bmm(grad, v.transpose(1, 2))
        scores.sub_((grad * out).sum(-1, keepdim=True)).mul_(p).mul_(q.shape[2] ** -0.5)
        return torch.bmm(scores, k), torch.bmm(scores.transpose(1, 2), q), grad_v, None


# ----------------------------------------------------------------------------------------------- element by element


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension of float32 logits."""
    return torch.log_softmax(logits, -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gives x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight is broadcast to x [..., D]."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return cast("Tensor", _RMSNorm.apply(x, weight, eps))
    return (x * _rms_scale(x, eps)).mul_(weight)


def _rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension: [..., 1]."""
    return (x * x).sum(-1, True).div_(_scalar(int(x.shape[-1]))).add_(_scalar(eps)).rsqrt_()


@cache
def _scalar(value: float) -> Tensor:
    """A number as a tensor: an operation takes it in a third of the time that a number takes it."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _rms_scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With n = x scale and g = grad weight: d weight = sum(grad n) over rows, d x = (g - n mean(g n)) scale."""
        (grad,), (x, weight, scale) = grads, ctx.saved_tensors
        normed = x * scale
        both = grad * normed
        grad_weight = both.sum_to_size(weight.shape) if ctx.needs_input_grad[1] else None
        mean = both.mul_(weight).mean(-1, keepdim=True)
        return (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale), grad_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [M, heads, d] in pairs (i, i + d/2); the first half of `sin` has its sign turned."""
    if torch.is_grad_enabled():
        turned = x.roll(x.shape[-1] // 2, -1)
    else:  # several times as fast, and the same numbers at the same places
        heads, size = map(int, x.shape[-2:])
        turned = x.flatten(-2).index_select(-1, _halves_changed(heads, size)).view(-1, heads, size)
    return (x * cos).add_(turned.mul_(sin))


@cache
def _halves_changed(heads: int, size: int) -> Tensor:
    """Where the other half of each head stands: int64 [heads * size]."""
    return torch.arange(heads * size).view(heads, 2, size // 2).flip(1).flatten()


def gate(gates: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """silu(gates) * up, or with GELU in its tanh form, for [M, F]; rows may stand apart in memory, as those of a wider product do.

    Two threads share a tensor in halves, which are whole steps of the vector code where its size is a multiple of HALVES;
    more would not be, so that with more threads than two the tensor goes to them in pieces that each leave to so few. What is
    not contiguous is gone through row by row, so that each row has to be whole steps; GELU's vector code wants contiguous rows.
    """
    act, piece = (F.silu, 2 * GRAIN) if activation == "silu" else (_gelu_tanh, GELU_ALONE)
    steps = _steps(gates.dtype)
    if activation != "silu" or gates.shape[1] % steps:
        gates = gates.contiguous()
    size, missing = gates.numel(), -gates.numel() % steps
    if not missing and (torch.get_num_threads() <= 2 or size <= piece):
        return act(gates) * up
    pieces = cast("tuple[Tensor, ...]", F.pad(gates.flatten(), (0, missing)).split(piece))
    return torch.cat([act(part) for part in pieces])[:size].view_as(up) * up


def _steps(dtype: torch.dtype) -> int:
    """Elements that vector code goes on by, for as many threads as there are."""
    return STEP_BYTES // dtype.itemsize if torch.get_num_threads() == 1 else HALVES


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
