"""From a golden case to calls of Tandem's public functions: names and shapes are translated, and nothing is computed here.

A case holds padded [B, T] tables; Tandem takes packed tokens, so a table is read row after row, with T tokens a row and
its mask. `replay(case)` gives what the case lists under `outputs`, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.algos.advantages import group_baseline, spread
from tandem.algos.aggregation import aggregate, loss_weights
from tandem.algos.kl import kl_divergence
from tandem.algos.policy_losses import ppo_clip
from tandem.algos.supervised import negative_log_likelihood
from tandem.algos.terms import LossInputs, TokenLoss, keep

Case = dict[str, Any]
Outputs = dict[str, Any]

KL_NAMES = {"low_var_kl": "k3"}


def replay(case: Case) -> Outputs:
    """The outputs of a case, by their canonical names. Raises KeyError for a function that Tandem does not have."""
    return REPLAYS[f"{case['function_kind']}/{case['algorithm']}"](Table(case), case["params"])


class Table:
    """The inputs of a case: token tables packed into [N], row columns as [B]."""

    def __init__(self, case: Case) -> None:
        self.inputs = case["inputs"]
        self.mask = torch.tensor(self.inputs["mask"]).bool().flatten()
        self.shape = (len(self.inputs["mask"]), len(self.inputs["mask"][0]))
        self.lengths = torch.full((self.shape[0],), self.shape[1])

    def __getitem__(self, name: str) -> Tensor:
        return torch.tensor(self.inputs[name], dtype=torch.float64).flatten()

    def columns(self) -> dict[str, Tensor]:
        return {name: self[name] for name in self.inputs if name != "mask"}

    def padded(self, packed: Tensor) -> list[Any]:
        return packed.detach().reshape(self.shape).tolist()

    def weights(self, params: dict[str, Any], ranks: int = 1) -> Tensor:
        """A missing scale factor is the padded width by the convention of these cases, not of Tandem."""
        constant = (params.get("scale_factor") or self.shape[1]) if params["agg"] == "seq-mean-token-sum-norm" else None
        return loss_weights(self.mask, self.lengths, aggregation=params["agg"], length_constant=constant, ranks=ranks)


def _aggregation(table: Table, params: dict[str, Any]) -> Outputs:
    losses = table["loss_mat"].requires_grad_()
    loss = aggregate(losses, table.weights(params), table.mask)
    loss.backward()
    split = table.weights(params, ranks=params.get("dp_size", 1))
    parts = params.get("row_parts", [list(range(table.shape[0]))])
    by_row = [value.view(table.shape) for value in (losses.detach(), split, table.mask)]
    return {
        "loss": loss.item(),
        "grad_loss_mat": table.padded(gradient(losses)),
        "part_losses": [aggregate(*(value[rows].flatten() for value in by_row)).item() for rows in parts],
    }


def _group_baseline(table: Table, params: dict[str, Any]) -> Outputs:
    scale = params.get("scale_rewards", "group" if params.get("norm_by_std") else "none")
    given = {"std_eps": params.get("eps"), "ddof": params.get("ddof"), "leave_one_out": params.get("leave_one_out")}
    advantages = group_baseline(
        table["rewards"],
        torch.tensor(table.inputs["group_ids"]),
        scale=scale,
        singleton="reward",
        **{name: value for name, value in given.items() if value is not None},
    )
    return {"advantages": table.padded(spread(advantages, table.mask, table.lengths))}


def _kl(table: Table, params: dict[str, Any]) -> Outputs:
    estimator = params["estimator"].removesuffix("+")
    gradient_of = "straight_through" if params["estimator"].endswith("+") else "direct"
    gradient_of = "unbiased" if params.get("unbiased_gradient") else "weighted" if params.get("is_weighted") else gradient_of
    logprobs = table["new_logprobs"].requires_grad_()
    kl = kl_divergence(
        logprobs,
        table["ref_logprobs"],
        estimator=KL_NAMES.get(estimator, estimator),
        gradient=gradient_of,
        old_logprobs_N=table.columns().get("old_logprobs"),
    )
    kl = keep(kl, table.mask)
    kl.sum().backward()
    return {"kl": table.padded(kl), "grad_new_logprobs": table.padded(gradient(logprobs))}


def _ppo_clip(table: Table, params: dict[str, Any]) -> Outputs:
    kl = {"estimator": KL_NAMES.get(params.get("kl_type", "k3"), params.get("kl_type", "k3"))}
    kl["gradient"] = "weighted" if params.get("kl_is_correction") else "direct"
    outputs, result = _loss(
        table,
        params,
        lambda inputs: ppo_clip(
            inputs,
            clip_low=params["clip_low"],
            clip_high=params["clip_high"],
            dual_clip=params.get("dual_clip_c"),
            log_ratio_clamp=params.get("log_ratio_clamp", 20.0),
            kl_coef=params.get("kl_coef", 0.0),
            kl_estimator=kl["estimator"],
            kl_gradient=kl["gradient"],
        ),
    )
    outputs["per_token_loss"] = table.padded(result.terms["policy"])
    metrics = result.metrics.values_by_name()
    outputs["metrics"] = {
        "clip_fraction": metrics["clip_fraction"],
        "kl_old_new_k1_mean": metrics["kl_old_new"],
        "dual_clip_fraction": metrics.get("dual_clip_fraction", 0.0),
    }
    if "ref_logprobs" in table.inputs:
        estimate = kl_divergence(table["new_logprobs"], table["ref_logprobs"], old_logprobs_N=table["old_logprobs"], **kl)
        outputs["metrics"] |= {
            "kl_loss": aggregate(estimate, table.weights(params), table.mask).item(),
            "kl_ref_mean": metrics["kl_ref"],
        }
    return outputs


def _sft(table: Table, params: dict[str, Any]) -> Outputs:
    return _loss(table, params, negative_log_likelihood)[0]


def _loss(table: Table, params: dict[str, Any], function: Callable[[LossInputs], TokenLoss]) -> tuple[Outputs, TokenLoss]:
    logprobs = table["new_logprobs"].requires_grad_()
    result = function(LossInputs(logprobs, table.mask, table.lengths, table.columns()))
    loss = aggregate(result.loss, table.weights(params), table.mask)
    loss.backward()
    return {"loss": loss.item(), "grad_new_logprobs": table.padded(gradient(logprobs))}, result


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


REPLAYS: dict[str, Callable[[Table, dict[str, Any]], Outputs]] = {
    "aggregation/aggregation": _aggregation,
    "kl/kl_estimator": _kl,
    "sft/sft": _sft,
    "advantage/grpo": _group_baseline,
    "advantage/dr_grpo": _group_baseline,
    "policy_loss/ppo": _ppo_clip,
    "policy_loss/grpo": _ppo_clip,
    "policy_loss/dr_grpo": _ppo_clip,
    "policy_loss/dapo": _ppo_clip,
}
