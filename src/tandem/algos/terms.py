"""What a policy loss takes and what it gives: plain records, no arithmetic beyond hiding masked tokens.

A loss is a pure function `(LossInputs, *, parameters) -> TokenLoss`. It says what each token costs; how tokens are
averaged is not its business (aggregation.py), and neither is which tokens count: the mask is decided upstream.

Legend: B rows, N packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from tandem.errors import ColumnError
from tandem.types import Metric, Metrics

TOPK_IDS = "teacher_topk_ids"
"""Token column [N, K]: the tokens at each place whose logprobs a loss reads beside that of the token that stands there."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Rows from their first token to their last counted one at least, packed.

    logprobs: [N], with gradient, of each token under the policy being trained. mask: bool [N], the tokens that count.
    lengths: int64 [B]. columns: the batch's tensors by name, token level [N] or row level [B], without gradient.
    entropy: [N] of the policy's distribution at each token, where the engine gives it. groups: int64 [B], the same for rows
    of one group; a loss that is marked `whole_groups` finds all rows of a group here. at_topk: [N, K], with gradient, the
    logprobs of the tokens in column teacher_topk_ids, where the batch has it.
    """

    logprobs: Tensor
    mask: Tensor
    lengths: Tensor
    columns: Mapping[str, Tensor]
    entropy: Tensor | None = None
    groups: Tensor | None = None
    at_topk: Tensor | None = None

    @property
    def policy_logprobs(self) -> Tensor:
        """`logprobs` in float32 or better, 0 where masked: what stands there reaches neither loss nor gradient."""
        return keep(self.logprobs, self.mask)

    def token(self, name: str) -> Tensor:
        """Token column `name` in float32 or better, 0 where masked. Raises ColumnError if the batch lacks it."""
        return keep(self._column(name), self.mask)

    def row(self, name: str) -> Tensor:
        """Row column `name`, [B], on each counted token of its row, [N]. Raises ColumnError if the batch lacks it."""
        return keep(torch.repeat_interleave(self._column(name), self.lengths), self.mask)

    @property
    def topk_logprobs(self) -> Tensor:
        """`at_topk`, 0 where masked. Raises ColumnError if the batch lacks column teacher_topk_ids."""
        self._column(TOPK_IDS)
        assert self.at_topk is not None, f"the engine looks up what column {TOPK_IDS} names"
        return keep(self.at_topk, self.mask)

    def of_rows(self, name: str) -> Tensor:
        """Row column `name` as it is, [B]. Raises ColumnError if the batch lacks it."""
        return self._column(name)

    def _column(self, name: str) -> Tensor:
        if name not in self.columns:
            raise ColumnError(f"the loss reads column {name!r} and the batch has {sorted(self.columns)}")
        return self.columns[name]


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """terms: named parts [N] with gradient, finite where the mask is true; the loss of a token is their sum."""

    terms: Mapping[str, Tensor]
    metrics: Metrics

    @property
    def loss(self) -> Tensor:
        return torch.stack(list(self.terms.values())).sum(0)


LossFunction = Callable[..., TokenLoss]
TermScope = Literal["token", "row", "group"]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def whole_rows(function: _Function) -> _Function:
    """Marks a loss or correction that treats a row as one action: nothing may choose among the row's tokens."""
    function.__dict__["term_scope"] = "row"
    return function


def whole_groups(function: _Function) -> _Function:
    """Marks a loss that compares the rows of a group: no micro-batch and no rank may hold a part of one."""
    function.__dict__["term_scope"] = "group"
    return function


def scope_of(function: Callable[..., Any]) -> TermScope:
    """What is marked `whole_rows` has scope "row", `whole_groups` "group", all else "token"; a sum has its widest part's."""
    return getattr(function, "term_scope", "token")


def keep(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """`values_N` in float32 or better where `mask_N` is true and exactly 0 elsewhere, whatever stands there (NaN too).

    Values may have more dimensions, [N, ...].
    """
    values_N = values_N.to(torch.promote_types(values_N.dtype, torch.float32))
    return torch.where(mask_N.reshape(-1, *(1,) * (values_N.ndim - 1)), values_N, 0.0)


def masked_mean(values_N: Tensor, mask_N: Tensor) -> Metric:
    """The mean over the tokens that count, as a metric that merges with those of other micro-batches."""
    return Metric(float(keep(values_N.detach(), mask_N).sum(dtype=torch.float64)), float(mask_N.sum()))
