"""What the trainer makes of a batch, on plain tensors: columns of the whole batch, then the loss of an optimiser step.

Legend: B rows, N packed tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tandem.algos.aggregation import aggregate
from tandem.algos.columns import credit, credit_needs, derive, derived_columns, loss_ref, step_columns
from tandem.algos.functions import loss_function
from tandem.algos.segments import row_counts
from tandem.algos.shaping import Resampling, resampling_probabilities, resampling_weights
from tandem.algos.table import ALGORITHMS, configure
from tandem.algos.terms import LossInputs, TokenLoss
from tandem.types import Algorithm

Rows = dict[str, Tensor]
"""Columns by name: of rows [B] those of OF_ROWS, of tokens [N] all others. `mask` and `lengths` are always there, and
`episode` where an episode has several rows, which then share their other columns of rows."""

OF_ROWS = frozenset(
    {
        *("lengths", "groups", "episode", "temperature", "chosen", "margins"),
        *("rewards", "reward_baselines", "reward_components", "token_counts"),
        *("resample_counts", "kl_coef", "reward_kl_coef"),
    }
)

REQUIRED: dict[str, dict[str, Any]] = {"dr_grpo": {"length_constant": 8.0}}
POLICY = [name for name, row in ALGORITHMS.items() if row.advantage is not None]


def algorithm(name: str, **params: Any) -> Algorithm:
    """The row with its defaults, and a value for what has none."""
    return configure(name, {**REQUIRED.get(name, {}), **params})


def with_credit(chosen: Algorithm, rows: Rows) -> Rows:
    """With the advantages and what they are made from, and how often each episode is drawn anew."""
    for name in credit_needs(chosen) & derived_columns(chosen).keys():
        rows = {**rows, name: derive(chosen, name, rows)[0]}
    ids = rows.get("episode", torch.arange(len(rows["lengths"]))).tolist()
    first = {episode: row for row, episode in reversed([*enumerate(ids)])}
    place = {episode: i for i, episode in enumerate(first)}
    episode_B = torch.tensor([place[episode] for episode in ids], dtype=torch.int64)
    episodes = {name: column[list(first.values())] for name, column in rows.items() if name in OF_ROWS}
    counts_B = row_counts(rows["mask"], rows["lengths"])
    episodes["token_counts"] = counts_B.new_zeros(len(first)).index_add(0, episode_B, counts_B)
    if chosen.params["resampling"]:
        rows = {**rows, "resample_counts": expected_counts(chosen, episodes["rewards"])[episode_B]}
    return {**rows, **credit(chosen, rows, episodes, episode_B)}


def expected_counts(chosen: Algorithm, rewards_E: Tensor) -> Tensor:
    """[E]: on average, where training draws."""
    method, weight_pow = cast("Resampling", chosen.params["resampling"]), cast("float", chosen.params["resampling_pow"])
    return len(rewards_E) * resampling_probabilities(resampling_weights(rewards_E, method=method, weight_pow=weight_pow))


def with_choices(chosen: Algorithm, rows: Rows) -> Rows:
    """With the other columns that are made of a whole batch: corrections, and tokens chosen by their covariance."""
    for name in derived_columns(chosen).keys() - credit_needs(chosen):
        rows = {**rows, name: derive(chosen, name, rows)[0]}
    return rows


def with_columns(chosen: Algorithm, rows: Rows) -> Rows:
    """With all that is made of the whole batch before it is split, the weights of the tokens last."""
    if chosen.advantage is not None:
        rows = with_choices(chosen, with_credit(chosen, rows))
    return {**rows, **step_columns(chosen, rows)}


def token_loss(chosen: Algorithm, rows: Rows, logprobs: Tensor, at_topk: Tensor | None = None) -> TokenLoss:
    """What each token costs, and metrics. A critic's values are what the model gives in place of logprobs."""
    loss = loss_ref(chosen)
    columns = {name: rows[name] for name in rows if name != "correction" or "correction" in chosen.needs}
    inputs = LossInputs(logprobs, rows["mask"], rows["lengths"], columns, groups=rows["groups"], at_topk=at_topk, values=logprobs)
    return loss_function(loss.name)(inputs, **loss.params)


def step_loss(chosen: Algorithm, rows: Rows, logprobs: Tensor, at_topk: Tensor | None = None) -> Tensor:
    """The loss of these rows, a scalar: of a whole step, or of the part that a micro-batch holds."""
    return aggregate(token_loss(chosen, rows, logprobs, at_topk).loss, rows["loss_weights"], rows["mask"])


def gradient(chosen: Algorithm, rows: Rows) -> tuple[float, Tensor]:
    """The loss, and its gradient [N, 1 + K] in column `logprobs` and in the policy's logprobs of K more tokens."""
    logprobs, at_topk = (rows[name].clone().requires_grad_() for name in ("logprobs", "topk_logprobs"))
    total = step_loss(chosen, rows, logprobs, at_topk)
    of_token, of_topk = torch.autograd.grad(total, (logprobs, at_topk), allow_unused=True, materialize_grads=True)
    return total.item(), torch.cat([of_token[:, None], of_topk], 1)
