"""Sums over the rows of a packed batch and over groups by id. No padding is made and no position decides a group.

Every reduction selects counted tokens and never multiplies by the mask, so that what stands under it is inert.

Legend: B rows, N packed tokens, M counted tokens, n_i counted tokens of row i.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from tandem.algos.terms import keep


def row_of_token(lengths_B: Tensor) -> Tensor:
    """int64 [N]: the row of each token."""
    return torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)


def on_tokens(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """[N]: each row's value on all of its tokens; differentiable."""
    return torch.repeat_interleave(values_B, lengths_B.to(values_B.device))


def row_counts(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """int64 [B]: counted tokens of each row."""
    return torch.segment_reduce(mask_N.double(), "sum", lengths=lengths_B.to(mask_N.device), unsafe=True).long()


def row_sum(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B]: the sum of each row's counted tokens, 0 for a row without one; differentiable."""
    kept = keep(values_N, mask_N)
    return torch.segment_reduce(kept, "sum", lengths=lengths_B.to(kept.device), unsafe=True)


def row_mean(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B]: the mean of each row's counted tokens, 0 for a row without one; differentiable."""
    return row_sum(values_N, mask_N, lengths_B) / row_counts(mask_N, lengths_B).clamp(min=1)


def row_max(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B]: the largest counted value of each row, 0 for a row without one."""
    kept = keep(values_N, mask_N)[mask_N]
    row_M = row_of_token(lengths_B.to(kept.device))[mask_N]
    return kept.new_zeros(len(lengths_B)).scatter_reduce(0, row_M, kept, "amax", include_self=False)


def last_counted(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """A bool [N], true on the last counted token of each row that has one."""
    left_M = _left_in_row(row_counts(mask_N, lengths_B))
    return torch.zeros_like(mask_N).masked_scatter(mask_N, left_M == 0)


def discounted_sums(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor, discount: float | Tensor) -> Tensor:
    """G_t = v_t + discount G_(next counted t), from each row's end: [N], 0 where masked, without gradient.

    Masked tokens are stepped over: they cost no discount and their values do not count. The recurrence is solved by
    doubling, G <- G + discount^(2^j) G shifted by 2^j, in ceil(log2(max n_i)) passes over the batch.

    Args:
        values_N: [N]. mask_N: bool [N]. lengths_B: int64 [B].
        discount: one factor, or one a row ([B]).
    """
    sums_M = keep(values_N.detach(), mask_N)[mask_N]
    counts_B = row_counts(mask_N, lengths_B)
    left_M = _left_in_row(counts_B)
    factor_M = on_tokens(torch.as_tensor(discount, dtype=sums_M.dtype, device=sums_M.device).expand(len(counts_B)), counts_B)
    shift, longest = 1, int(counts_B.max()) if len(counts_B) else 0
    while shift < longest:
        ahead_M = (factor_M[:-shift] * sums_M[shift:]).masked_fill_(left_M[:-shift] < shift, 0.0)
        sums_M[:-shift] += ahead_M
        factor_M, shift = factor_M**2, shift * 2
    return torch.zeros_like(mask_N, dtype=sums_M.dtype).masked_scatter(mask_N, sums_M)


def next_in_row(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[N]: the value of the next counted token of the same row, 0 on a row's last one and where masked."""
    values_M = keep(values_N, mask_N)[mask_N]
    left_M = _left_in_row(row_counts(mask_N, lengths_B))
    ahead_M = torch.where(left_M > 0, values_M.roll(-1), 0.0)
    return torch.zeros_like(mask_N, dtype=values_M.dtype).masked_scatter(mask_N, ahead_M)


def _left_in_row(counts_B: Tensor) -> Tensor:
    """int64 [M]: how many tokens follow each in its row."""
    end_M = on_tokens(counts_B.cumsum(0), counts_B)
    return end_M - 1 - torch.arange(len(end_M), device=end_M.device)


class Groups:
    """Sums over groups told apart by id, each given back to all members.

    groups_B: int64 [B] ids, in any order and with gaps.
    """

    def __init__(self, groups_B: Tensor) -> None:
        ids, self.index = cast("tuple[Tensor, Tensor]", torch.unique(groups_B, return_inverse=True))
        self.num = len(ids)
        self.size = self.sum(torch.ones_like(self.index, dtype=torch.float64))

    def sum(self, values_B: Tensor) -> Tensor:
        """[B]: the sum of each entry's group."""
        return values_B.new_zeros(self.num).index_add(0, self.index, values_B)[self.index]

    def mean(self, values_B: Tensor) -> Tensor:
        """[B]: the mean of each entry's group."""
        return self.sum(values_B) / self.size.to(values_B.dtype)

    def lowest(self, values_B: Tensor) -> Tensor:
        """[B]: the least of each entry's group."""
        return self._extreme(values_B, "amin")

    def highest(self, values_B: Tensor) -> Tensor:
        """[B]: the greatest of each entry's group."""
        return self._extreme(values_B, "amax")

    def _extreme(self, values_B: Tensor, which: str) -> Tensor:
        return values_B.new_zeros(self.num).scatter_reduce(0, self.index, values_B, which, include_self=False)[self.index]
