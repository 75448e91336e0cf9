"""From hidden states to log-probabilities: the output layer, and the one place where tokens are shifted.

`next_logprobs` gives rollout the whole distribution; `token_logprobs` gives training the part of it that tokens of its
choice have, and `top_logprobs` the likeliest tokens, with the same bits and without ever holding the logits of a whole
batch. The functions on rows (`row_logprobs`, `row_top`, `row_sum_pi_squared`, `row_values`) are the only ones of Tandem that
know that hidden state t - 1 predicts token t. Nothing here knows of losses.

Legend: M rows, V vocabulary, D width, K tokens looked up at one place, B rows of a batch, T padded time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ColumnError
from tandem.models import numerics
from tandem.models.kv_cache import KVCache
from tandem.models.language_model import LanguageModel
from tandem.models.numerics import ROWS, Packed, padded
from tandem.models.values import ValueModel

CHUNK_LOGITS = 1 << 24  # logits held at a time where nothing is passed back
KEPT_BYTES = 1 << 28  # of logits, in the compute dtype, held at a time by default where something is
CACHED_LOGITS = 1 << 20  # gone through at a time in float32, so that they stay in a processor's cache


def next_logprobs(model: LanguageModel, hidden: Tensor, temperature: Tensor, cache: KVCache | None = None) -> Tensor:
    """Log-softmax of logits / temperature: float32 [M, V], for hidden [M, D] and temperature [M] (0 counts as 1).

    cache: the one that `hidden` was decoded with; it keeps the output layer in the compute dtype for the next call.
    """
    weight: Tensor | Packed
    if cache is None:
        weight = model.output_weight
    else:
        weight = cache.output = cache.output or numerics.packed(model.output_weight)
    return _logprobs(_pad_rows(hidden), weight, _divisor(temperature))[: hidden.shape[0]]


def token_logprobs(
    model: LanguageModel,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    chunk_rows: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each row's targets and, when asked, the entropy of its distribution: float32, [M] the latter.

    hidden [M, D], targets int64 [M] or [M, K], and the logprobs of their shape; temperature [M] (0 counts as 1). Both results
    are differentiable in hidden and in the output layer. Logits exist for `chunk_rows` rows at a time (by default for
    KEPT_BYTES) and, unless all are one chunk, are computed again in the backward pass. Neither the chunks nor the
    other rows change a row's bits: they are `next_logprobs`'s.
    """
    weight, rows = model.output_weight, hidden.shape[0]
    step = _chunk(weight, chunk_rows or KEPT_BYTES // (weight.shape[0] * weight.itemsize))
    sought = targets if targets.ndim == 2 else targets[:, None]
    args = (
        _pad_rows(hidden),
        weight,
        _pad_rows(sought),
        _divisor(temperature),
        step,
        with_entropy,
    )
    logprobs, entropy = cast("tuple[Tensor, Tensor]", _TokenLogprobs.apply(*args))
    return logprobs[:rows].reshape(targets.shape), entropy[:rows] if with_entropy else None


def top_logprobs(
    model: LanguageModel, hidden: Tensor, temperature: Tensor, top: int, *, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """The `top` likeliest tokens of each row's distribution, likeliest first: int64 and float32 [M, top], without gradient.

    hidden [M, D], temperature [M] (0 counts as 1). Logits exist for `chunk_rows` rows at a time. Raises ColumnError for a
    `top` that is not in [1, V].
    """
    weight, rows = model.output_weight.detach(), hidden.shape[0]
    if not 1 <= top <= weight.shape[0]:
        raise ColumnError(f"top={top} likeliest tokens are asked for, of a vocabulary of {weight.shape[0]}")
    hidden, divisor, step = _pad_rows(hidden.detach()), _divisor(temperature), _chunk(weight, chunk_rows)
    ids, logprobs = torch.empty(len(hidden), top, dtype=torch.int64), torch.empty(len(hidden), top)
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        logprobs[part], ids[part] = _logprobs(hidden[part], weight, divisor[part]).topk(top)
    return ids[:rows], logprobs[:rows]


def row_logprobs(
    model: LanguageModel,
    tokens: Tensor,
    lengths: Tensor,
    mask: Tensor,
    temperature: Tensor,
    with_entropy: bool = False,
    targets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of tokens[b, t] given tokens[b, :t] where `mask` is true, and 0 elsewhere: float32 [B, T].

    tokens int64 [B, T], padded on the right with any token; lengths int64 [B]; mask bool [B, T]; temperature [B]. Only
    masked positions go through the output layer. The second result is the entropy of the same distributions, when asked.
    targets: int64 [B, T, K], tokens to look up at each place instead of the one that stands there; the first result is
    [B, T, K] then. Raises ColumnError where the mask is true at position 0, which nothing predicts, or past a row's length.
    """
    at, hidden = _predicting(model, tokens, lengths, mask)
    sought = tokens if targets is None else targets
    logprobs, entropy = token_logprobs(model, hidden, sought[at], temperature[at[0]], with_entropy=with_entropy)
    placed = torch.zeros(sought.shape).index_put(at, logprobs)
    return placed, None if entropy is None else torch.zeros(tokens.shape).index_put(at, entropy)


def row_top(
    model: LanguageModel, tokens: Tensor, lengths: Tensor, mask: Tensor, temperature: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """`top_logprobs` of the distribution at each masked place of rows as `row_logprobs` takes them: [B, T, top], 0 elsewhere."""
    with torch.no_grad():
        at, hidden = _predicting(model, tokens, lengths, mask)
        ids, logprobs = top_logprobs(model, hidden, temperature[at[0]], top)
        shape = (*tokens.shape, top)
        return torch.zeros(shape, dtype=torch.int64).index_put(at, ids), torch.zeros(shape).index_put(at, logprobs)


def row_sum_pi_squared(model: LanguageModel, tokens: Tensor, lengths: Tensor, mask: Tensor, temperature: Tensor) -> Tensor:
    """The sum of squared probabilities of the distribution at each masked place of such rows: float32 [B, T], no gradient."""
    with torch.no_grad():
        at, hidden = _predicting(model, tokens, lengths, mask)
        weight, divisor = model.output_weight, _divisor(temperature[at[0]])
        found, hidden = torch.empty(len(divisor)), _pad_rows(hidden)
        for start in range(0, len(hidden), step := _chunk(weight, None)):
            part = slice(start, start + step)
            found[part] = (2 * _logprobs(hidden[part], weight, divisor[part])).exp().sum(1)
        return torch.zeros(tokens.shape).index_put(at, found[: len(at[0])])


def row_values(model: ValueModel, tokens: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """The value of the state in which each masked token of such rows was chosen: float32 [B, T], 0 elsewhere, differentiable."""
    at, hidden = _predicting(model, tokens, lengths, mask)
    return torch.zeros(tokens.shape).index_put(at, model.values(hidden))


def _predicting(model: LanguageModel, tokens: Tensor, lengths: Tensor, mask: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The masked places (b, t), and the hidden state [M, D] that predicts each: the one before it."""
    place = torch.arange(tokens.shape[1])
    wrong = mask & ((place == 0) | (place >= lengths[:, None]))
    if wrong.any():
        b, t = (int(i) for i in wrong.nonzero()[0])
        raise ColumnError(f"row {b} has its mask true at position {t}, but only 1 to {int(lengths[b]) - 1} are predicted by tokens")
    b, t = mask.nonzero().unbind(1)
    return (b, t), model.states_at(tokens, (lengths - 1).clamp(min=0), (b, t - 1))


def _chunk(weight: Tensor, chunk_rows: int | None) -> int:
    """Rows whose logits are held at a time."""
    return padded(chunk_rows or CHUNK_LOGITS // weight.shape[0], ROWS)


def _pad_rows(x: Tensor) -> Tensor:
    missing = padded(x.shape[0], ROWS) - x.shape[0]
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x


def _divisor(temperature: Tensor) -> Tensor:
    """[M, 1], padded: what logits are divided by."""
    temperature = _pad_rows(temperature)
    return temperature.masked_fill(temperature == 0, 1.0)[:, None]


def _logprobs(hidden: Tensor, weight: Tensor | Packed, divisor: Tensor) -> Tensor:
    return _soft(numerics.linear(hidden, weight), divisor)


def _soft(logits: Tensor, divisor: Tensor) -> Tensor:
    """Log-softmax of logits / divisor; float32 logits are written over."""
    return numerics.log_softmax(logits.float().div_(divisor))


class _TokenLogprobs(torch.autograd.Function):
    """Rows are padded, targets [M, K]. Gives log-probabilities [M, K] and entropies (empty unless asked for).

    Logits, then the probabilities, then the gradient of the logits have one place in memory, a piece of rows at a time: the kernels
    of products want many rows at once. All else goes through them in parts that a processor's cache holds.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, step: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        rows, trained = hidden.shape[0], any(ctx.needs_input_grad)
        logprobs, entropy = torch.empty(targets.shape), torch.empty(rows if with_entropy else 0)
        held = hidden
        for piece in _slices(0, rows, step):
            held = numerics.linear(hidden[piece], weight)
            for at in _slices(piece.start, piece.stop, _chunk(weight, CACHED_LOGITS // weight.shape[0])):
                part = held[at.start - piece.start : at.stop - piece.start]
                soft = _soft(part, divisor[at])
                logprobs[at] = soft.gather(1, targets[at])
                if trained or with_entropy:
                    p = soft.exp()
                    part.copy_(p)
                    if with_entropy:
                        entropy[at] = soft.mul_(p).sum(1).neg_()
        kept = held if trained and rows <= step else None  # the probabilities of all rows, where they are one piece
        ctx.save_for_backward(hidden, weight, targets, divisor, logprobs, entropy, kept)
        ctx.step = step
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """With z = logits / temperature: d logprob / dz = onehot - p for each target, d entropy / dz = -p (log p + entropy)."""
        hidden, weight, targets, divisor, logprobs, entropy, kept = ctx.saved_tensors
        rows, (for_hidden, for_weight, *_) = hidden.shape[0], ctx.needs_input_grad
        grad_logprobs = torch.zeros(targets.shape) if grads[0] is None else grads[0] / divisor
        grad_entropy = None if grads[1] is None or not entropy.numel() else grads[1][:, None] / divisor
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight: Tensor | None = None
        for piece in _slices(0, rows, ctx.step):
            held = numerics.linear(hidden[piece], weight) if kept is None else kept
            for at in _slices(piece.start, piece.stop, _chunk(weight, CACHED_LOGITS // weight.shape[0])):
                part = held[at.start - piece.start : at.stop - piece.start]
                p = _soft(part, divisor[at]).exp() if kept is None else part.float()
                p.scatter_(1, targets[at], logprobs[at].exp())  # 1 - p must not be that of a rounded p
                change = p * grad_logprobs[at].sum(1, keepdim=True)
                if grad_entropy is not None:
                    change.add_(torch.xlogy(p, p).add_(p.mul_(entropy[at, None])).mul_(grad_entropy[at]))
                part.copy_(change.neg_().scatter_add_(1, targets[at], grad_logprobs[at]))
            if grad_hidden is not None:
                grad_hidden[piece] = numerics.product(held, weight)
            if for_weight:
                found = numerics.product(held.t(), hidden[piece])
                if grad_weight is None:
                    grad_weight = found if kept is not None else found.float()
                else:
                    grad_weight += found
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    """From start to stop in steps."""
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))
