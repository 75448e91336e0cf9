"""Losses on demonstrations: the tokens to imitate are the counted ones."""

from __future__ import annotations

from tandem.algos.terms import LossInputs, TokenLoss, masked_mean
from tandem.types import Metrics


def negative_log_likelihood(inputs: LossInputs) -> TokenLoss:
    """-x for each token x to imitate."""
    loss = -inputs.policy_logprobs
    metrics = {"nll": masked_mean(loss, inputs.mask)}
    if inputs.entropy is not None:
        metrics["entropy"] = masked_mean(inputs.entropy, inputs.mask)
    return TokenLoss({"nll": loss}, Metrics(metrics))
