"""What the trainer makes of a batch, on plain tensors: columns of the whole batch, then the loss of an optimiser step.

Legend: B rows, N packed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.algos.aggregation import aggregate
from tandem.algos.columns import credit, derive, derived_columns, loss_ref, step_columns
from tandem.algos.functions import loss_function
from tandem.algos.segments import row_counts
from tandem.algos.table import ALGORITHMS, configure
from tandem.algos.terms import LossInputs
from tandem.types import Algorithm

Rows = dict[str, Tensor]
"""Columns by name: of tokens [N] or of rows [B], with `mask` [N], `lengths` [B] and `groups` [B]. A row is an episode."""

REQUIRED: dict[str, dict[str, Any]] = {"dr_grpo": {"length_constant": 8.0}}
POLICY = [name for name, row in ALGORITHMS.items() if row.advantage is not None]


def algorithm(name: str, **params: Any) -> Algorithm:
    """The row with its defaults, and a value for what has none."""
    return configure(name, {**REQUIRED.get(name, {}), **params})


def with_columns(chosen: Algorithm, rows: Rows) -> Rows:
    """With what is made of the whole batch before it is split: rewards of tokens, advantages, choices, weights."""
    if chosen.advantage is not None:
        columns = derived_columns(chosen).keys()
        if "token_rewards" in columns:
            rows = {**rows, "token_rewards": derive(chosen, "token_rewards", rows)[0]}
        episodes = {**rows, "token_counts": row_counts(rows["mask"], rows["lengths"])}
        rows = {**rows, **credit(chosen, rows, episodes, torch.arange(len(rows["lengths"])))}
        for name in columns - {"token_rewards"}:
            rows = {**rows, name: derive(chosen, name, rows)[0]}
    return {**rows, **step_columns(chosen, rows)}


def step_loss(chosen: Algorithm, rows: Rows, logprobs: Tensor) -> Tensor:
    """The loss of these rows, a scalar: of a whole step, or of the part that a micro-batch holds."""
    loss = loss_ref(chosen)
    columns = {name: rows[name] for name in rows if name != "correction" or "correction" in chosen.needs}
    result = loss_function(loss.name)(LossInputs(logprobs, rows["mask"], rows["lengths"], columns), **loss.params)
    return aggregate(result.loss, rows["loss_weights"], rows["mask"])


def gradient(chosen: Algorithm, rows: Rows) -> tuple[float, Tensor]:
    """The loss, and its gradient [N] in column `logprobs`."""
    logprobs = rows["logprobs"].clone().requires_grad_()
    total = step_loss(chosen, rows, logprobs)
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad
