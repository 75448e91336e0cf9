"""From hidden states to log-probabilities: the output layer, and the one place where tokens are shifted.

`next_logprobs` gives rollout the whole distribution, `token_logprobs` gives training the sampled tokens' share of it,
with the same bits; neither ever holds logits of all positions of a batch. `row_logprobs` is the only function of
Tandem that knows that hidden state t - 1 predicts token t. It knows nothing of losses.

Legend: M rows, V vocabulary, D width, B rows of a batch, T padded time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ColumnError
from tandem.models import numerics
from tandem.models.decoder import Decoder

CHUNK_ROWS = 1024


def next_logprobs(decoder: Decoder, hidden: Tensor, temperature: Tensor) -> Tensor:
    """Log-softmax of logits / temperature: float32 [M, V] for hidden [M, D] and temperature [M] (0 counts as 1)."""
    rows = hidden.shape[0]
    return _logprobs(_pad_rows(hidden), decoder.output_weight, _pad_rows(_divisor(temperature)))[:rows]


def token_logprobs(
    decoder: Decoder,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    chunk_rows: int = CHUNK_ROWS,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each row's target and, when asked, the entropy of its distribution: float32 [M] both.

    hidden [M, D], targets int64 [M], temperature [M] (0 counts as 1). Differentiable in hidden and the output layer.
    Logits exist for `chunk_rows` rows at a time and are computed again in the backward pass; neither the chunk size
    nor the other rows change a row's bits, which are those of `next_logprobs`.
    """
    rows = hidden.shape[0]
    step = numerics.padded(chunk_rows)
    args = (_pad_rows(hidden), decoder.output_weight, _pad_rows(targets), _pad_rows(_divisor(temperature)))
    logprobs, entropy = _TokenLogprobs.apply(*args, step, with_entropy)  # type: ignore[no-untyped-call]
    return logprobs[:rows], entropy[:rows] if with_entropy else None


def row_logprobs(
    decoder: Decoder, tokens: Tensor, lengths: Tensor, mask: Tensor, temperature: Tensor, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of tokens[b, t] given tokens[b, :t], where `mask` is true, and 0 elsewhere: float32 [B, T].

    tokens int64 [B, T], right-padded with anything; lengths int64 [B]; mask bool [B, T]; temperature [B]. Only masked
    positions go through the output layer. The second result is the entropy of the same distributions, when asked.
    Raises ColumnError where the mask is true at position 0, which has no prediction, or past a row's length.
    """
    T = tokens.shape[1]
    inside = (torch.arange(T) < lengths[:, None]) & (torch.arange(T) > 0)
    if bool((mask & ~inside).any()):
        b, t = (mask & ~inside).nonzero()[0].tolist()
        raise ColumnError(f"row {b} is masked in at position {t}, but only positions 1 to {int(lengths[b]) - 1} have a prediction")
    b, t = mask.nonzero(as_tuple=True)
    hidden = decoder.prefill(tokens[:, :-1])[b, t - 1]
    logprobs, entropy = token_logprobs(decoder, hidden, tokens[b, t], temperature[b], with_entropy=with_entropy)
    blank = torch.zeros(tokens.shape)
    return blank.index_put((b, t), logprobs), None if entropy is None else blank.index_put((b, t), entropy)


def _divisor(temperature: Tensor) -> Tensor:
    return torch.where(temperature == 0, 1.0, temperature)


def _pad_rows(x: Tensor) -> Tensor:
    missing = numerics.padded(x.shape[0]) - x.shape[0]
    return F.pad(x, (0, 0, 0, missing) if x.ndim == 2 else (0, missing), value=1) if missing else x


def _logprobs(hidden: Tensor, weight: Tensor, divisor: Tensor) -> Tensor:
    logits = numerics.linear(hidden, weight.to(hidden.dtype)).float()
    return numerics.log_softmax(logits.div_(divisor[:, None]))


class _TokenLogprobs(torch.autograd.Function):
    """All arguments have a multiple of numerics.ROWS rows. Gives log-probabilities and entropies (empty unless asked)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, step: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0])
        entropy = torch.empty(hidden.shape[0] if with_entropy else 0)
        for at in range(0, hidden.shape[0], step):
            part = slice(at, at + step)
            full = _logprobs(hidden[part], weight, divisor[part])
            logprobs[part] = full.gather(1, targets[part, None])[:, 0]
            if with_entropy:
                entropy[part] = -(full.exp() * full).sum(1)
        ctx.save_for_backward(hidden, weight, targets, divisor, entropy)
        ctx.step = step
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, divisor, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for at in range(0, hidden.shape[0], ctx.step):
            part = slice(at, at + ctx.step)
            full = _logprobs(hidden[part], weight, divisor[part])
            p = full.exp()
            grad = p * -grad_logprobs[part, None]
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            if entropy.numel():
                grad -= p * (full + entropy[part, None]) * grad_entropy[part, None]
            grad = (grad / divisor[part, None]).to(hidden.dtype)
            grad_hidden[part] = numerics.product(grad, weight.to(hidden.dtype))
            grad_weight += numerics.product(grad.T, hidden[part])
        return grad_hidden, grad_weight, None, None, None, None
