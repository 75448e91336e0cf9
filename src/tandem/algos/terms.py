"""What a policy loss takes and what it gives: plain records, no arithmetic beyond hiding masked tokens.

A loss is a pure function `(LossInputs, *, parameters) -> TokenLoss`. It says what each token costs; how tokens are
averaged is not its business (aggregation.py), and neither is which tokens count: the mask is decided upstream.

Legend: B rows, N packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from tandem.algos.checks import keep, num_counted, require_finite, require_layout
from tandem.errors import ColumnError
from tandem.types import Metric, Metrics

TOPK_IDS = "teacher_topk_ids"
"""Token column [N, K]: the tokens at each place whose logprobs a loss reads beside that of the token that stands there."""


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Rows from their first token to their last counted one at least, packed.

    logprobs: [N], with gradient, of each token under the model being trained; None where that gives values instead, which are
    in `values`, [N] with gradient. mask: bool [N], the tokens that count.
    lengths: int64 [B]. columns: the batch's tensors by name, token level [N] or row level [B], without gradient.
    entropy: [N] of the policy's distribution at each token, where the engine gives it. groups: int64 [B], the same for rows
    of one group; a loss that is marked `whole_groups` finds all rows of a group here. at_topk: [N, K], with gradient, the
    logprobs of the tokens in column teacher_topk_ids, where the batch has it. keys: what errors call the rows.

    A column is checked when it is read: ColumnError where the batch lacks it or it is of another size, NonFiniteError
    where it counts and is not finite. Whether `logprobs` are is for the engine to judge, with the loss.
    """

    logprobs: Tensor | None
    mask: Tensor
    lengths: Tensor
    columns: Mapping[str, Tensor]
    entropy: Tensor | None = None
    groups: Tensor | None = None
    at_topk: Tensor | None = None
    keys: Sequence[object] = ()
    values: Tensor | None = None
    _kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor], init=False, repr=False)

    def __post_init__(self) -> None:
        require_layout(self.mask, self.lengths)
        for name, output in (("logprobs", self.logprobs), ("values", self.values)):
            if output is not None and output.shape != self.mask.shape:
                raise ColumnError(f"{name} have shape {list(output.shape)} and column 'mask' {list(self.mask.shape)}")

    @property
    def policy_logprobs(self) -> Tensor:
        """`logprobs` in float32 or better, 0 where masked: what stands there reaches neither loss nor gradient."""
        return self._keep(self._given(self.logprobs, "logprobs"))

    @property
    def new_values(self) -> Tensor:
        """`values`, likewise; column values is what they were before the update."""
        return self._keep(self._given(self.values, "values"))

    def token(self, name: str) -> Tensor:
        """Token column `name` in float32 or better, 0 where masked."""
        if name not in self._kept:
            column = self._column(name, len(self.mask), "token")
            self._kept[name] = self._keep(column)
            require_finite(name, self._kept[name], "token", self.lengths, self.keys)
        return self._kept[name]

    def row(self, name: str) -> Tensor:
        """Row column `name`, [B], on each counted token of its row, [N]."""
        return self._keep(torch.repeat_interleave(self.of_rows(name), self.lengths))

    @property
    def topk_logprobs(self) -> Tensor:
        """`at_topk`, 0 where masked. Raises ColumnError if the batch lacks column teacher_topk_ids."""
        self._column(TOPK_IDS, len(self.mask), "token")
        assert self.at_topk is not None, f"the engine looks up what column {TOPK_IDS} names"
        return self._keep(self.at_topk)

    def of_rows(self, name: str) -> Tensor:
        """Row column `name` as it is, [B]."""
        column = self._column(name, len(self.lengths), "row")
        require_finite(name, column, "row", keys=self.keys)
        return column

    def mean(self, values_N: Tensor) -> Metric:
        """`masked_mean` over the tokens that count."""
        return _mean(values_N, self.mask, self.num_counted)

    @cached_property
    def num_counted(self) -> int:
        """How many tokens count."""
        return num_counted(self.mask)

    def _keep(self, values_N: Tensor) -> Tensor:
        return keep(values_N, self.mask, self.num_counted)

    def _given(self, output: Tensor | None, name: str) -> Tensor:
        if output is None:
            raise ColumnError(f"the loss reads {name} of the model, which does not give them")
        return output

    def _column(self, name: str, size: int, axis: str) -> Tensor:
        if name not in self.columns:
            raise ColumnError(f"the loss reads column {name!r} and the batch has {sorted(self.columns)}")
        column = self.columns[name]
        if column.dim() == 0 or len(column) != size:
            raise ColumnError(f"the loss reads column {name!r} by {axis}, {size} of them, and it has shape {list(column.shape)}")
        return column


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """terms: named parts [N] with gradient, finite where the mask is true; the loss of a token is their sum."""

    terms: Mapping[str, Tensor]
    metrics: Metrics

    @property
    def loss(self) -> Tensor:
        return reduce(torch.add, self.terms.values())


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


def masked_mean(values_N: Tensor, mask_N: Tensor) -> Metric:
    """The mean over the tokens that count, or the share of them where a bool is true; it merges with those of other parts."""
    return _mean(values_N, mask_N, num_counted(mask_N))


def _mean(values_N: Tensor, mask_N: Tensor, num: int) -> Metric:
    if values_N.dtype == torch.bool:
        return Metric(float(num_counted(values_N & mask_N)), float(num))
    return Metric(keep(values_N.detach(), mask_N, num).sum().item(), float(num))
