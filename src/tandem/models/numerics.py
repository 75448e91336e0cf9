"""Every product and softmax of model code, in forms whose bits for a row do not depend on what stands beside it.

Training scores a whole batch at once, generation one token a row among changing companions. Both call these
functions, so the log-probabilities of the two are equal bit for bit where the start-up probe (probe.py) finds that
this machine's kernels keep to the rules below. It is not a kernel library: everything is torch.

The rules, and why each is there (CPU, torch 2.13):

1. The rows M of a matrix product are a multiple of ROWS. Kernels fall into classes by M (1; 2 and 3; 4 and more), and
   with two threads the rows left over by an uneven split are summed in another order.
2. A window of keys starts at column 0 of its row and is a multiple of KEYS long. Q K^T takes other kernels for very
   short windows, and P V takes the keys in blocks counted from the first column.
3. P V is summed over tiles of TILE keys, in order. Left alone, the kernel cuts the sum by the length of the window.
4. A product of queries has at least QUERIES rows: grouped heads can leave one to three in a decode step.
5. Softmax is explicit and in float32; masked columns are -inf, hence exactly 0, and add nothing to any sum.
6. Element-wise code is made of add, sub, mul, div and sqrt, which round correctly and so have the same bits in scalar
   and in vector code. `exp` has not: torch splits work above 32,768 elements between threads, and the ends of the
   pieces run scalar code. Rule 1 makes those pieces whole vectors for one and two threads.

Legend: M rows (tokens, padded), N attention problems (row x kv head), Q query rows of one, W keys of one, H heads,
d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
KEYS = 16
TILE = 128
QUERIES = 4


def padded(count: int, multiple: int = ROWS) -> int:
    """`count` rounded up to a multiple, at least one of it."""
    return max(-(-count // multiple), 1) * multiple


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gives x [M, in] times weight [out, in] transposed, plus bias [out]; M a multiple of ROWS, all of one dtype."""
    assert x.shape[0] % ROWS == 0, f"{x.shape[0]} rows are no multiple of {ROWS}"
    return F.linear(x, weight, bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Gives a [M, K] times b [K, N] for backward passes: no promise about bits."""
    return a @ b


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension, in float32."""
    return torch.log_softmax(logits.float(), -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gives x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [..., H, d]: pairs are (i, i + d/2); the first half of `sin` is negated."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def gate(gates: Tensor, up: Tensor) -> Tensor:
    """silu(gates) * up."""
    return F.silu(gates) * up


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T + bias) v; q [N, Q, d] scaled already, k and v [N, W, d], bias [N or 1, Q, W] float32 of 0 and -inf.

    W is a multiple of KEYS. Differentiable in q, k and v.
    """
    assert k.shape[1] % KEYS == 0, f"{k.shape[1]} keys are no multiple of {KEYS}"
    rows = q.shape[1]
    if rows < QUERIES:
        q, bias = F.pad(q, (0, 0, 0, QUERIES - rows)), F.pad(bias, (0, 0, 0, QUERIES - rows))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out: Any = _Attention.apply(q, k, v, bias)
    else:
        out = _values(_weights(q, k, bias), v)
    return out[:, :rows]


def _weights(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    scores = torch.bmm(q, k.transpose(1, 2)).float() + bias
    return torch.softmax(scores, -1).to(q.dtype)


def _values(p: Tensor, v: Tensor) -> Tensor:
    out = torch.bmm(p[:, :, :TILE], v[:, :TILE]).float()
    for start in range(TILE, p.shape[2], TILE):
        out += torch.bmm(p[:, :, start : start + TILE], v[:, start : start + TILE])
    return out.to(p.dtype)


class _Attention(torch.autograd.Function):
    """Forward as in a decode step; backward by plain products, since only the forward's bits are promised."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        p = _weights(q, k, bias)
        out = _values(p, v)
        ctx.save_for_backward(q, k, v, p, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p, out = ctx.saved_tensors
        (grad,) = grads
        grad_v = torch.bmm(p.transpose(1, 2), grad)
        grad_p = torch.bmm(grad, v.transpose(1, 2)).float()
        inner = (grad.float() * out.float()).sum(-1, keepdim=True)
        grad_s = ((grad_p - inner) * p).to(q.dtype)
        return torch.bmm(grad_s, k), torch.bmm(grad_s.transpose(1, 2), q), grad_v, None
