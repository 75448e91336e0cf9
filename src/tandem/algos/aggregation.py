"""From token losses to the loss of an optimiser step: the one reducer.

Every mode is linear in the token losses, so its denominators are folded into one weight a token, computed once from
all rows of the step before they are split over micro-batches or ranks. What follows is a sum, and a sum does not
depend on how it is split. Weights are constants: nothing is normalised afterwards.

Legend: B rows, N packed tokens; n_i counted tokens of row i, S rows with n_i > 0, C length constant.
"""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from tandem.algos.checks import checked, keep, num_counted
from tandem.algos.segments import on_tokens, row_counts
from tandem.errors import EmptyBatchError

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


@checked
def loss_weights(
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    length_constant: float | None = None,
    repeats_B: Tensor | None = None,
    num_tokens: float | None = None,
    num_rows: float | None = None,
    ranks: int = 1,
) -> Tensor:
    """The weight w_t for which sum_t w_t loss_t is the aggregated loss of these rows, which are a whole optimiser step.

    token-mean 1 / sum_i n_i; seq-mean-token-mean 1 / (S n_i); seq-mean-token-sum 1 / S; seq-mean-token-sum-norm
    1 / (S C); token-sum 1. Rows without a counted token are not in S.

    Args:
        mask_N: bool [N], the tokens that count.
        lengths_B: int64 [B], tokens of each row, masked ones included.
        aggregation: the mode.
        length_constant: C, for seq-mean-token-sum-norm only; never taken from the width of some padding.
        repeats_B: [B], how many times each row counts, in its losses and in the denominators; None is once.
        num_tokens: what stands for sum_i n_i; None counts them. num_rows: what stands for S; None counts.
        ranks: over how many data-parallel ranks a back-end averages gradients; the weights make up for it.

    Returns:
        float32 [N], 0 where masked.

    Raises:
        ValueError: unknown mode, or C missing, useless or not positive.
        EmptyBatchError: no token counts.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation {aggregation!r} is unknown; there are {', '.join(AGGREGATIONS)}")
    if aggregation == "seq-mean-token-sum-norm" and length_constant is None:
        raise ValueError(f"aggregation={aggregation} needs length_constant: set it to the longest response, in tokens")
    if aggregation != "seq-mean-token-sum-norm" and length_constant is not None:
        raise ValueError(f"aggregation={aggregation} does not use length_constant={length_constant}: leave it out")
    if length_constant is not None and not length_constant > 0:
        raise ValueError(f"length_constant must be positive, got {length_constant}")

    for name, value in (("num_tokens", num_tokens), ("num_rows", num_rows)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")

    counted_B = row_counts(mask_N, lengths_B).double()
    repeats_B = torch.ones_like(counted_B) if repeats_B is None else repeats_B.double()
    counted, with_tokens = (repeats_B * counted_B).sum(), (repeats_B * (counted_B > 0)).sum()
    if counted == 0 and counted_B.any():
        raise EmptyBatchError(
            f"none of these {len(lengths_B)} rows was drawn anew: use fewer mini-batches with resampling, or learner.on_empty=skip"
        )
    if counted == 0:
        raise EmptyBatchError(f"none of the {len(mask_N)} tokens in {len(lengths_B)} rows counts: there is nothing to train on")
    tokens = counted if num_tokens is None else counted.new_tensor(num_tokens)
    rows = with_tokens if num_rows is None else with_tokens.new_tensor(num_rows)
    match aggregation:
        case "token-mean":
            weight_B = 1 / tokens.expand_as(counted_B)
        case "seq-mean-token-mean":
            weight_B = 1 / (rows * counted_B)
        case "seq-mean-token-sum":
            weight_B = 1 / rows.expand_as(counted_B)
        case "seq-mean-token-sum-norm":
            weight_B = 1 / (rows * cast("float", length_constant)).expand_as(counted_B)
        case "token-sum":
            weight_B = torch.ones_like(counted_B)
    return keep(on_tokens((ranks * repeats_B * weight_B).float(), lengths_B), mask_N)


def aggregate(loss_N: Tensor, weights_N: Tensor, mask_N: Tensor) -> Tensor:
    """sum_t weights_t loss_t over counted tokens, a scalar; parts of a step add up to the whole of it."""
    return cast("Tensor", _WeightedSum.apply(loss_N, weights_N, mask_N))


class _WeightedSum(torch.autograd.Function):
    """What is masked is selected away once, from the weights, which are the gradient too; NaN in a masked loss once more."""

    @staticmethod
    def forward(ctx: Any, loss_N: Tensor, weights_N: Tensor, mask_N: Tensor) -> Tensor:
        num = num_counted(mask_N)
        kept_N = keep(weights_N, mask_N, num)
        ctx.save_for_backward(kept_N)
        return keep(loss_N * kept_N, mask_N, num).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None


def mean_over(chosen_N: Tensor, weights_N: Tensor, *, repeats_N: Tensor | None = None, ranks: int = 1) -> Tensor:
    """The factor [N] that turns `weights_N` into those of a mean over the chosen tokens of the step: 1 / (#chosen weights), else 0.

    For a term that is averaged over other tokens than the rest of the loss; computed from the whole step, like the weights.
    repeats_N: [N], how many times each token counts; None is once.
    """
    repeats = torch.ones_like(weights_N) if repeats_N is None else repeats_N
    chosen = chosen_N & (weights_N != 0)
    count = torch.where(chosen, repeats, 0).sum()
    return torch.where(chosen, ranks * repeats / (count * weights_N), 0.0)
