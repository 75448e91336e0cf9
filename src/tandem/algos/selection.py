"""Tokens chosen from a whole step by how their logprob and advantage covary; computed before the step is split.

Legend: N packed tokens, M counted ones; x logprobs at the start of the update, A advantages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algos.checks import checked, keep, num_counted
from tandem.algos.ratios import check


@checked
def covariances(old_logprobs_N: Tensor, advantages_N: Tensor, mask_N: Tensor) -> Tensor:
    """(A - mean A)(x - mean x) over counted tokens, [N], 0 where masked (arXiv 2505.22617, equation 9)."""
    num = num_counted(mask_N)
    if not num:
        return torch.zeros_like(old_logprobs_N)
    x, a = (column - column.sum(dtype=torch.float64).item() / num for column in (old_logprobs_N, advantages_N))
    return keep(x * a, mask_N, num)


@checked
def most_covariant(old_logprobs_N: Tensor, advantages_N: Tensor, mask_N: Tensor, *, cov_frac: float = 2e-4) -> Tensor:
    """The floor(M cov_frac) tokens, at least one, of the highest covariance: bool [N] (KL-Cov).

    Which of equal covariances are chosen is left to their order in the batch.
    """
    check(0 < cov_frac <= 1, f"cov_frac must be in (0, 1], got {cov_frac}")
    counted_M = torch.nonzero(mask_N)[:, 0]
    covariance_M = covariances(old_logprobs_N, advantages_N, mask_N)[counted_M]
    ranked = covariance_M.topk(min(max(int(len(counted_M) * cov_frac), 1), len(counted_M)))
    return torch.zeros_like(mask_N).index_fill(0, counted_M[ranked.indices], True)


@checked
def random_covariant(
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    uniforms_N: Tensor,
    *,
    cov_frac: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """floor(M cov_frac) tokens, at least one, drawn from those with cov_low < covariance < cov_high: bool [N] (Clip-Cov).

    uniforms_N: one random number a token, which decides the draw: the smallest win. Fewer are drawn where fewer lie between.
    """
    check(0 < cov_frac <= 1, f"cov_frac must be in (0, 1], got {cov_frac}")
    check(cov_low < cov_high, f"cov_low={cov_low} must be below cov_high={cov_high}")
    covariance = covariances(old_logprobs_N, advantages_N, mask_N)
    between = mask_N & (covariance > cov_low) & (covariance < cov_high)
    num = min(max(int(num_counted(mask_N) * cov_frac), 1), int(between.sum()))
    lots = torch.where(between, uniforms_N.double(), torch.inf)
    return torch.zeros_like(mask_N).index_fill(0, lots.topk(num, largest=False).indices, True)
