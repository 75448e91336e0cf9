"""Losses on demonstrations: the tokens to imitate are the counted ones."""

from __future__ import annotations

from tandem.algos.terms import LossInputs, TokenLoss
from tandem.types import Metrics


def negative_log_likelihood(inputs: LossInputs) -> TokenLoss:
    """-x for each token x to imitate."""
    loss = -inputs.policy_logprobs
    metrics = {"nll": inputs.mean(loss)}
    if inputs.entropy is not None:
        metrics["entropy"] = inputs.mean(inputs.entropy)
    return TokenLoss({"nll": loss}, Metrics(metrics))
