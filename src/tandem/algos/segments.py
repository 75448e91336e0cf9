"""Sums over the rows of a packed batch and over groups by id. No padding is made and no position decides a group.

Every reduction selects counted tokens and never multiplies by the mask, so that what stands under it is inert.

Legend: B rows, N packed tokens, M counted tokens, n_i counted tokens of row i.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.algos.checks import keep, num_counted


def row_of_token(lengths_B: Tensor) -> Tensor:
    """int64 [N]: the row of each token."""
    return torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)


def on_tokens(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """[N]: each row's value on all of its tokens; differentiable."""
    return cast("Tensor", _OnTokens.apply(values_B, lengths_B)) if values_B.requires_grad else _repeated(values_B, lengths_B)


def _repeated(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    if values_B.is_cpu and values_B.dtype != torch.bfloat16:  # which NumPy does not know
        return torch.from_numpy(values_B.numpy().repeat(lengths_B.numpy(force=True)))
    return torch.repeat_interleave(values_B, lengths_B.to(values_B.device))


def row_counts(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """int64 [B]: counted tokens of each row."""
    if num_counted(mask_N) == len(mask_N):
        return lengths_B.to(mask_N.device)
    upto = mask_N.new_zeros(len(mask_N) + 1, dtype=torch.int64)
    torch.cumsum(mask_N, 0, out=upto[1:])
    ends_B = lengths_B.to(mask_N.device).cumsum(0)
    return upto[ends_B] - upto[ends_B - lengths_B.to(mask_N.device)]


def row_sum(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B]: the sum of each row's counted tokens, 0 for a row without one; differentiable."""
    kept = keep(values_N, mask_N, num_counted(mask_N))
    return torch.segment_reduce(kept, "sum", lengths=lengths_B.to(kept.device), unsafe=True)


def row_mean(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B]: the mean of each row's counted tokens, 0 for a row without one; differentiable."""
    return row_sum(values_N, mask_N, lengths_B) / row_counts(mask_N, lengths_B).clamp(min=1)


def row_max(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B]: the largest counted value of each row, 0 for a row without one."""
    kept = torch.where(mask_N, keep(values_N, mask_N), -torch.inf)
    largest = kept.new_full((len(lengths_B),), -torch.inf).scatter_reduce(0, row_of_token(lengths_B.to(kept.device)), kept, "amax")
    return torch.where(row_counts(mask_N, lengths_B) > 0, largest, 0.0)


class _OnTokens(torch.autograd.Function):
    """Each value once a token; what flows back to a row is the sum over its tokens.

    torch.repeat_interleave looks every token up by an index and adds up its gradients one by one: five times as slow.
    """

    @staticmethod
    def forward(ctx: Any, values_B: Tensor, lengths_B: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_B)
        return _repeated(values_B, lengths_B)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        lengths_B = ctx.saved_tensors[0].to(grads[0].device)
        return torch.segment_reduce(grads[0], "sum", lengths=lengths_B, unsafe=True), None


class CountedTokens:
    """The counted tokens of a batch in their order, without the masked ones between them: what recurrences run over.

    counts: int64 [B], how many of them each row has. Where every token counts, they are the batch, and nothing is moved.
    """

    def __init__(self, mask_N: Tensor, lengths_B: Tensor) -> None:
        self.counts = row_counts(mask_N, lengths_B)
        self._total = len(mask_N)
        self._place = None if int(self.counts.sum()) == self._total else torch.nonzero(mask_N)[:, 0]
        self._ends = self.counts.cumsum(0)[self.counts > 0] - 1

    def of(self, values_N: Tensor) -> Tensor:
        """[M]: the counted values."""
        return values_N if self._place is None else values_N.index_select(0, self._place)

    def back(self, values_M: Tensor) -> Tensor:
        """[N]: the values where they stand, 0 (or False) where masked."""
        return values_M if self._place is None else values_M.new_zeros(self._total).scatter(0, self._place, values_M)

    def last(self) -> Tensor:
        """Bool [N]: true on the last counted token of each row that has one."""
        num = self._total if self._place is None else len(self._place)
        return self.back(torch.zeros(num, dtype=torch.bool, device=self.counts.device).index_fill(0, self._ends, True))

    def next(self, values_M: Tensor) -> Tensor:
        """[M]: the value of the next token of the row, 0 for a row's last one."""
        return values_M.roll(-1).index_fill_(0, self._ends, 0.0)

    def discounted_sums(self, values_M: Tensor, discount: float | Tensor) -> Tensor:
        """G_t = v_t + discount G_next, from each row's end: [M], without gradient.

        The recurrence is solved by doubling in ceil(log2(max n_i)) passes: after each, G_t covers twice as many tokens, and
        `factor_t` is what the value `shift` tokens ahead of t is discounted by, 0 where that is no longer in the row.

        discount: one factor, or one a row ([B]).
        """
        if isinstance(discount, Tensor):
            factor = on_tokens(discount.to(values_M.dtype), self.counts)
        else:
            factor = torch.full_like(values_M, discount)
        factor = factor.index_fill_(0, self._ends, 0.0)
        sums, longest = values_M.detach().clone(), int(self.counts.max()) if len(self.counts) else 0
        spare = torch.empty_like(factor)  # a new tensor in each pass would cost as much as what is computed
        shift = 1
        while shift < longest:
            ahead = len(sums) - shift
            sums[:ahead] += torch.mul(factor[:ahead], sums[shift:], out=spare[:ahead])
            left = max(len(factor) - shift, 0)
            factor, spare = torch.mul(factor[:left], factor[shift:], out=spare[:left]), factor
            shift *= 2
        return sums


Array = npt.NDArray[np.float64]


def to_array(values_B: Tensor) -> Array:
    """[B] as float64 on the host. For a few hundred numbers a call of NumPy costs half of one of torch."""
    known = values_B.float() if values_B.dtype == torch.bfloat16 else values_B
    return known.numpy(force=True).astype(np.float64)


class Groups:
    """Statistics of groups told apart by id, one a group or given back to all members. NumPy arrays of the host.

    groups_B: int64 [B] ids, in any order and with gaps. index: int64 [B], the group of each entry. sizes: float64 [G].
    """

    def __init__(self, groups_B: Tensor) -> None:
        ids = groups_B.numpy(force=True)
        order = ids.argsort(kind="stable")  # which is quick where they are in order already
        rising = ids[order]
        self.index = np.zeros(len(ids), np.int64)
        self.index[order[1:]] = np.add.accumulate(rising[1:] != rising[:-1])
        self.sizes = np.bincount(self.index).astype(np.float64)

    @property
    def size(self) -> Array:
        """[B]: how many entries each entry's group has."""
        return self.members(self.sizes)

    def members(self, values_G: Array) -> Array:
        """[B]: the value of each entry's group."""
        return values_G.take(self.index)

    def totals(self, values_B: Array) -> Array:
        """[G]: the sum of each group."""
        return cast("Array", np.bincount(self.index, values_B))

    def sum(self, values_B: Array) -> Array:
        """[B]: the sum of each entry's group."""
        return self.members(self.totals(values_B))

    def mean(self, values_B: Array) -> Array:
        """[B]: the mean of each entry's group."""
        return self.members(self.totals(values_B) / self.sizes)

    def anchor(self, values_B: Array) -> Array:
        """[B]: a value of each entry's group, the same one for all its members: less this, equal values are exactly 0."""
        some_G = np.empty(len(self.sizes))
        some_G[self.index] = values_B
        return self.members(some_G)

    def lowest(self, values_B: Array) -> Array:
        """[B]: the least of each entry's group."""
        least_G = np.full(len(self.sizes), np.inf)
        np.minimum.at(least_G, self.index, values_B)
        return self.members(least_G)

    def highest(self, values_B: Array) -> Array:
        """[B]: the greatest of each entry's group."""
        return -self.lowest(-values_B)
