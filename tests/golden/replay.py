"""From a golden case to calls of Tandem's public functions: names and shapes are translated, and nothing is computed here.

A case holds padded [B, T] tables; Tandem takes packed tokens, so a table is read row after row, with T tokens a row and
its mask. `replay(case)` gives what the case lists under `outputs`, in float64. Where a case follows a peer's choice that
is not Tandem's default, the choice is a named parameter here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tandem.algos import advantages, corrections, policy_losses, preferences, returns, selection, sequence_losses, shaping, values
from tandem.algos.aggregation import aggregate, loss_weights, mean_over
from tandem.algos.checks import keep
from tandem.algos.composition import loss_sum
from tandem.algos.distillation import generalized_jsd, topk_kl
from tandem.algos.extra_terms import distillation_term, kl_term, positive_nll, reverse_kl_policy_gradient, squared_log_ratio
from tandem.algos.kl import adapted_kl_coef, kl_divergence
from tandem.algos.ratios import log_ratio
from tandem.algos.segments import row_counts, row_sum
from tandem.algos.supervised import negative_log_likelihood
from tandem.algos.terms import LossFunction, LossInputs, TokenLoss
from tandem.trainer.workers import mismatch

Case = dict[str, Any]
Params = dict[str, Any]
Outputs = dict[str, Any]


def replay(case: Case) -> Outputs:
    """The outputs of a case, by their canonical names. Raises KeyError for a function that Tandem does not have."""
    return REPLAYS[f"{case['function_kind']}/{case['algorithm']}"](Table(case), case["params"])


class Table:
    """The inputs of a case: token tables packed into [N], row columns as [B]."""

    def __init__(self, case: Case) -> None:
        self.inputs = case["inputs"]
        self.mask = self["mask"].bool() if "mask" in self.inputs else torch.ones(0, dtype=torch.bool)
        self.shape = torch.tensor(self.inputs.get("mask", [[]])).shape
        self.lengths = torch.full((self.shape[0],), self.shape[1])

    def __getitem__(self, name: str) -> Tensor:
        return self.raw(name).flatten()

    def raw(self, name: str) -> Tensor:
        return torch.tensor(self.inputs[name], dtype=torch.float64)

    @property
    def groups(self) -> Tensor:
        return torch.tensor(self.inputs["group_ids"])

    def columns(self) -> dict[str, Tensor]:
        return {name: self[name] for name in self.inputs if name != "mask"}

    def padded(self, packed: Tensor) -> list[Any]:
        return packed.detach().reshape(self.shape).tolist()

    def spread(self, values_B: Tensor) -> Tensor:
        return advantages.spread(values_B, self.mask, self.lengths)

    def weights(self, params: Params, ranks: int = 1) -> Tensor:
        """A missing scale factor is the padded width by the convention of these cases, not of Tandem."""
        mode = params.get("agg", "seq-mean-token-mean")
        constant = (params.get("scale_factor") or self.shape[1]) if mode == "seq-mean-token-sum-norm" else None
        return loss_weights(self.mask, self.lengths, aggregation=mode, length_constant=constant, ranks=ranks)


def given(params: Mapping[str, Any], **names: str) -> Params:
    """The parameters that a case sets, under Tandem's names: `tandem_name="canonical_name"`."""
    return {mine: params[theirs] for mine, theirs in names.items() if theirs in params}


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def groups_of(table: Table, size: int) -> Tensor:
    """Ids of groups that stand one after another, which these cases do not list: that of its first row for each."""
    return torch.arange(table.shape[0]).view(-1, size)[:, :1].expand(-1, size).flatten()


# ----------------------------------------------------------------------------------------------- aggregation, KL


def _aggregation(table: Table, params: Params) -> Outputs:
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


KL_NAMES = {"low_var_kl": "k3"}


def _kl(table: Table, params: Params) -> Outputs:
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


def _kl_controller(table: Table, params: Params) -> Outputs:
    history = [params["init"]]
    for kl in params["kl_sequence"]:
        next_coef = adapted_kl_coef(history[-1], kl, **given(params, target="target", horizon="horizon", num_steps="n_steps"))
        history.append(next_coef)
    return {"coef_history": history[1:]}


def _binary_kl(table: Table, params: Params) -> Outputs:
    trained, sampled = table["old_logprobs"], table["rollout_logprobs"]
    return {
        "kl_train_rollout": table.padded(keep(corrections.binary_kl(trained, sampled), table.mask)),
        "kl_rollout_train": table.padded(keep(corrections.binary_kl(sampled, trained), table.mask)),
    }


# --------------------------------------------------------------------------------------------------- advantages


def _episodes(function: Callable[..., Tensor], **fixed: Any) -> Callable[[Table, Params], Outputs]:
    """One advantage a row, from rewards and groups, spread over the row's tokens."""

    def run(table: Table, params: Params) -> Outputs:
        found = {"rewards_B": table["rewards"], "token_counts_B": row_counts(table.mask, table.lengths)}
        found["groups_B"] = table.groups if "group_ids" in table.inputs else torch.zeros(len(table.lengths))
        positional = {name: found[name] for name in found if name in inspect.signature(function).parameters}
        return {"advantages": table.padded(table.spread(function(**positional, **fixed)))}

    return run


def _group_baseline(table: Table, params: Params) -> Outputs:
    scale = params.get("scale_rewards", "group" if params.get("norm_by_std") else "none")
    set_here = given(params, std_eps="eps", ddof="ddof", leave_one_out="leave_one_out")
    return _episodes(advantages.group_baseline, scale=scale, singleton="reward", **set_here)(table, params)


def _best_of_group(table: Table, params: Params) -> Outputs:
    scale = "group" if params["norm_by_std"] else "none"
    return _episodes(advantages.best_of_group, scale=scale)(table, params)


def _whitened_baseline(table: Table, params: Params) -> Outputs:
    of_group = advantages.group_baseline(table["rewards"].double(), table.groups, scale="none", singleton="reward")
    return {"advantages": table.padded(_whiten(table.spread(of_group), table, params))}


def _gdpo(table: Table, params: Params) -> Outputs:
    of_components = advantages.decoupled_normalization(
        table.raw("reward_components"), table.groups, singleton="reward", **given(params, reward_weights="reward_weights")
    )
    return {"advantages": table.padded(_whiten(table.spread(of_components), table, params))}


def _whiten(values_N: Tensor, table: Table, params: Params) -> Tensor:
    if params.get("whiten") is False:
        return values_N
    return returns.whiten(values_N, table.mask, **given(params, whiten_ddof="whiten_ddof"))


def _whiten_alone(table: Table, params: Params) -> Outputs:
    return {"whitened": table.padded(returns.whiten(table["x"], table.mask, **given(params, whiten_ddof="ddof", whiten_eps="eps")))}


def _token_rewards(table: Table, params: Params) -> Tensor:
    if "token_rewards" in table.inputs:
        return table["token_rewards"]
    logprobs = [table[name] for name in ("old_logprobs", "ref_logprobs") if name in table.inputs]
    return returns.token_rewards(
        table["rewards"],
        table.mask,
        table.lengths,
        *(logprobs if "kl_coef" in params else ()),
        **given(params, reward_kl_coef="kl_coef"),
    )


def _kl_in_reward(table: Table, params: Params) -> Outputs:
    return {"token_rewards": table.padded(_token_rewards(table, params))}


def _credit(
    function: Callable[..., returns.Credit], columns: tuple[str, ...], whitens: bool, **names: str
) -> Callable[[Table, Params], Outputs]:
    """Advantages and returns, token by token; `columns` are the inputs between the token rewards and the mask."""

    def run(table: Table, params: Params) -> Outputs:
        middle = [table.groups if name == "group_ids" else table[name] for name in columns]
        credit = function(_token_rewards(table, params), *middle, table.mask, table.lengths, **given(params, **names))
        found = _whiten(credit.advantages, table, params) if whitens else credit.advantages
        return {"advantages": table.padded(found), "returns": table.padded(credit.returns)}

    return run


def _vapo_gae(table: Table, params: Params) -> Outputs:
    return _credit(
        returns.decoupled_gae,
        ("values",),
        False,
        gamma="gamma",
        lam_value="lam_value",
        lam_policy="lam_policy",
        length_adaptive_alpha="length_adaptive_alpha",
    )(table, params)


def _prime(table: Table, params: Params) -> Outputs:
    credit = returns.process_and_outcome(
        table["process_rewards"],
        table["acc"],
        groups_of(table, params["group_size"]),
        table.mask,
        table.lengths,
        **given(params, process_coef="reward_dpo_coef", outcome_coef="reward_gt_coef"),
    )
    return {"advantages": table.padded(_whiten(credit.advantages, table, params)), "returns": table.padded(credit.returns)}


def _opd_advantage(table: Table, params: Params) -> Outputs:
    student, teacher = table["old_logprobs"], table["teacher_logprobs"]
    if "opd_kl_coef" not in params:
        return {"advantages": table.padded(returns.teacher_advantage(student, teacher, table.mask))}
    found = returns.reverse_kl(table["advantages"], student, teacher, table.mask, **given(params, distillation_coef="opd_kl_coef"))
    return {"advantages": table.padded(found)}


def _centred_rewards(table: Table, params: Params) -> Outputs:
    return {"centered_rewards": advantages.soft_mean_centred(table["rewards"], **given(params, soft_mean_beta="beta")).tolist()}


def _overlong(table: Table, params: Params) -> Outputs:
    found = shaping.overlong_penalty(table["rewards"], table["response_lengths"], **params)
    return {"rewards": found.tolist()}


def _stop_properly(table: Table, params: Params) -> Outputs:
    return {"rewards": shaping.stop_properly(table["rewards"], table["truncated"], **params).tolist()}


def _resampling(table: Table, params: Params) -> Outputs:
    weights = shaping.resampling_weights(row_sum(table["token_scores"], table.mask, table.lengths), **params)
    return {
        "resample_weights": weights.tolist(),
        "resample_probabilities": shaping.resampling_probabilities(weights).tolist(),
    }


# -------------------------------------------------------------------------------------------------- corrections


AREAL_FLOOR = 1e-8
"""The peer's floor, run in float64; in float32 it would round to certainty."""


def _corrected(table: Table, params: Params) -> corrections.Correction:
    chosen = params["correction"]
    old, rollout, mask, lengths = table["old_logprobs"], table["rollout_logprobs"], table.mask, table.lengths
    bounds = given(chosen, low="low", high="high") | given(params, log_ratio_clamp="log_ratio_clamp")
    match chosen["kind"]:
        case "token_tis":
            return corrections.token_tis(old, rollout, mask, **bounds)
        case "seq_tis":
            return corrections.seq_tis(old, rollout, mask, lengths, **given(chosen, low="low", high="high"))
        case "token_icepop":
            return corrections.icepop(old, rollout, mask, **bounds)
        case "kpop":
            return corrections.kpop(old, rollout, mask, probability_floor=AREAL_FLOOR, **bounds)
        case "seq_mask_tis":
            return corrections.seq_mask_tis(old, rollout, mask, lengths, **bounds)
        case "token_binary_kl" | "token_tv" as kind:
            return corrections.token_trust_region(old, rollout, mask, divergence=kind.removeprefix("token_"), **bounds)
        case "seq_binary_kl" | "seq_tv" as kind:
            return corrections.sequence_trust_region(old, rollout, mask, lengths, divergence=kind.removeprefix("seq_"), **bounds)
        case "seq_geo_mask":
            return corrections.sequence_mask(old, rollout, mask, lengths, ratio="geometric", **bounds)
        case "seq_product_mask":
            return corrections.sequence_mask(old, rollout, mask, lengths, ratio="product", **bounds)
        case "outlier_seq_mask":
            return corrections.sequence_mask(old, rollout, mask, lengths, ratio="outlier", **bounds)
        case "rs":
            tests = given(chosen, mode="mode", threshold="threshold")
            return corrections.rejection_sampling(old, rollout, mask, lengths, **tests)
        case kind:
            raise KeyError(f"correction {kind}")


def _correction(table: Table, params: Params) -> Outputs:
    found = _corrected(table, params)
    metrics = {name: metric.value for name, metric in (found.metrics or {}).items()}
    return {
        "weights": table.padded(found.column),
        "keep_mask": table.padded(found.kept.double()),
        "metrics": {"filter_fraction": metrics.get("correction_filtered")},
        "metrics_corr": {
            "masked_fraction": metrics.get("correction_filtered"),
            "seq_masked_fraction": metrics.get("correction_filtered_rows"),
        },
    }


def _m2po(table: Table, params: Params) -> Outputs:
    found = corrections.m2po(table["old_logprobs"], table["rollout_logprobs"], table.mask, **params)
    return {"keep_mask": table.padded(found.kept.double())}


def _opsm(table: Table, params: Params) -> Outputs:
    """The peer compares the current policy with the start of the update; Tandem's arguments are any two policies."""
    columns = (table["new_logprobs"], table["old_logprobs"], table["advantages"])
    found = corrections.off_policy_sequence_mask(*columns, table.mask, table.lengths, **params)
    return {"keep_mask": table.padded(found.kept.double())}


# ------------------------------------------------------------------------------------------------ policy losses


def _policy(function: LossFunction, fixed: Params | None = None, **names: str) -> Callable[[Table, Params], Outputs]:
    """A policy loss; `names` are its parameters and what the cases call them, `fixed` the choices of a peer."""

    def run(table: Table, params: Params) -> Outputs:
        return _loss(table, params, function, {**(fixed or {}), **given(params, **names)})

    return run


def _loss(table: Table, params: Params, function: LossFunction, arguments: Params, **more: Tensor) -> Outputs:
    columns = table.columns() | more
    metrics: dict[str, float] = {}
    outputs: Outputs = {}
    if "correction" in params:
        correction = _corrected(table, params)
        columns["correction"] = correction.column
        outputs["weights"] = table.padded(correction.column)
        filtered = (correction.metrics or {}).get("correction_filtered")
        metrics["filter_fraction"] = filtered.value if filtered else 0.0
        gap = mismatch(table["rollout_logprobs"], table["old_logprobs"], table.mask)
        metrics["kl_rollout_old_k1_mean"] = gap["mismatch/k1"].value
    logprobs = table["new_logprobs"].requires_grad_()
    result: TokenLoss = function(LossInputs(logprobs, table.mask, table.lengths, columns), **arguments)
    weights = table.weights(params)
    loss = aggregate(result.loss, weights, table.mask)
    loss.backward()
    measured = result.metrics.values_by_name()
    metrics |= {theirs: measured.get(mine, 0.0) for theirs, mine in METRIC_NAMES.items()}
    metrics |= {"kl_loss": kl_loss(table, params, weights)} if "ref_logprobs" in table.inputs else {}
    per_token = result.terms.get("policy", result.loss)
    outputs |= {"loss": loss.item(), "grad_new_logprobs": table.padded(gradient(logprobs)), "measured": measured}
    return outputs | {"per_token_loss": table.padded(per_token), "metrics": metrics}


METRIC_NAMES = {
    "clip_fraction": "clip_fraction",
    "kl_old_new_k1_mean": "kl_old_new",
    "dual_clip_fraction": "dual_clip_fraction",
    "kl_ref_mean": "kl_ref",
    "positive_nll_loss": "nll_positive",
}


def kl_loss(table: Table, params: Params, weights: Tensor) -> float:
    """The aggregated estimate before its coefficient, with the gradient left out."""
    inputs = LossInputs(table["new_logprobs"], table.mask, table.lengths, table.columns())
    return aggregate(kl_term(inputs, **_kl_arguments(params) | {"kl_coef": 1.0}).loss, weights, table.mask).item()


def _kl_arguments(params: Params) -> Params:
    if not params.get("kl_coef"):
        return {}
    name = params.get("kl_type", "k3")
    weighted = "weighted" if params.get("kl_is_correction") else "direct"
    return {"kl_coef": params["kl_coef"], "kl_estimator": KL_NAMES.get(name, name), "kl_gradient": weighted}


CLIPS = {"clip_low": "clip_low", "clip_high": "clip_high", "log_ratio_clamp": "log_ratio_clamp"}


def _ppo(table: Table, params: Params) -> Outputs:
    arguments = given(params, **CLIPS, dual_clip="dual_clip_c") | _kl_arguments(params)
    return _loss(table, params, loss_sum(policy_losses.ppo_clip, kl_term), arguments)


def _kl_cov(table: Table, params: Params) -> Outputs:
    columns = (table["new_logprobs"], table["advantages"], table.mask)
    covariant = selection.most_covariant(*columns, **given(params, cov_frac="kl_cov_ratio"))
    arguments = given(params, cov_kl_coef="ppo_kl_coef")
    outputs = _loss(table, params, policy_losses.kl_cov, arguments, most_covariant=covariant.double())
    outputs["metrics"]["kl_old_new_k1_mean"] = outputs["measured"]["abs_log_ratio"]  # the peer measures this one
    return outputs


def _gmpo(table: Table, params: Params) -> Outputs:
    """The peer counts what leaves the range on either side, apart by the sign of the advantage."""
    outputs = _policy(sequence_losses.geometric_mean, **CLIPS)(table, params)
    measured = outputs["measured"]
    outputs["metrics"] |= {
        "clip_fraction": measured["outside_fraction_positive"],
        "dual_clip_fraction": measured["outside_fraction_negative"],
    }
    return outputs


def _luspo(table: Table, params: Params) -> Outputs:
    return _policy(sequence_losses.sequence_clip, **CLIPS)(table, {**params, "agg": "seq-mean-token-sum"})


def _vapo(table: Table, params: Params) -> Outputs:
    positive = advantages.spread(table["rewards"], table.mask, table.lengths) > 0
    scale = mean_over(positive, table.weights(params))
    arguments = given(params, **CLIPS, positive_nll_weight="positive_nll_weight")
    return _loss(table, params, loss_sum(policy_losses.ppo_clip, positive_nll), arguments, positive_scale=scale)


def _sppo(table: Table, params: Params) -> Outputs:
    centred = table.spread(table["centered_rewards"])
    outputs = _loss(table, params, sequence_losses.squared_preference, given(params, eta="eta"), advantages=centred)
    difference = log_ratio(table["new_logprobs"], table["old_logprobs"], None)
    outputs["log_ratios"] = row_sum(difference, table.mask, table.lengths).tolist()
    return outputs


def _value(table: Table, params: Params) -> Outputs:
    predicted = table["values"].requires_grad_()
    result = values.value_loss(predicted, table["old_values"], table["returns"], table.mask, **given(params, value_clip="clip"))
    loss = aggregate(result.loss, table.weights(params), table.mask)
    loss.backward()
    fraction = result.metrics.values_by_name().get("value_clip_fraction")
    return {"loss": loss.item(), "grad_values": table.padded(gradient(predicted)), "metrics": {"clip_fraction": fraction}}


# ------------------------------------------------------------------------------------------ pairs, distillation


def _preference(table: Table, params: Params) -> Outputs:
    logprobs = table.raw("policy_seq_logps").requires_grad_()
    lengths = table.raw("completion_lens") if "completion_lens" in table.inputs else None
    names = {"preference": "loss_type", "beta": "beta", "label_smoothing": "label_smoothing"}
    result = preferences.preference_loss(logprobs, table.raw("ref_seq_logps"), lengths, **given(params, **names))
    result.loss.mean().backward()
    return {
        "loss": result.loss.mean().item(),
        "grad_policy_seq_logps": gradient(logprobs).tolist(),
        "chosen_rewards": result.rewards[:, 0].tolist(),
        "rejected_rewards": result.rewards[:, 1].tolist(),
        "metrics": {"accuracy": result.accuracy.item()},
    }


def _reward_model(table: Table, params: Params) -> Outputs:
    """The two loss types of the cases, sigmoid and logexp, are one function."""
    scores = table.raw("rewards_pair").requires_grad_()
    margin = table["margin"] if "margin" in table.inputs else None
    result = preferences.reward_model_loss(scores, margin, **given(params, centre_coef="center_rewards_coefficient"))
    result.loss.mean().backward()
    return {
        "loss": result.loss.mean().item(),
        "grad_rewards_pair": gradient(scores).tolist(),
        "metrics": {"accuracy": result.accuracy.item()},
    }


def _implicit_reward(table: Table, params: Params) -> Outputs:
    implicit = table["implicit_q"].requires_grad_()
    of_row = row_sum(implicit, table.mask, table.lengths)
    loss = preferences.implicit_reward_loss(of_row, table["acc"], **given(params, implicit_beta="beta")).mean()
    loss.backward()
    return {"loss": loss.item(), "grad_implicit_q": table.padded(gradient(implicit))}


def _implicit_accuracy(table: Table, params: Params) -> Outputs:
    groups = groups_of(table, params["group_size"])
    of_row = row_sum(table["implicit_q"], table.mask, table.lengths)
    pairs, absolute = preferences.implicit_reward_accuracy(of_row, table["acc"], groups)
    return {"metrics": {"dpo_accuracy": pairs.item(), "dpo_abs_accuracy": absolute.item()}}


def _on_logits(table: Table, losses_of: Callable[[Tensor], Tensor]) -> Outputs:
    logits = table.raw("student_logits").requires_grad_()
    losses = losses_of(logits.flatten(0, 1))
    loss = aggregate(losses, table.weights({"agg": "token-mean"}), table.mask)
    loss.backward()
    return {
        "loss": loss.item(),
        "per_token_loss": table.padded(keep(losses, table.mask)),
        "grad_student_logits": gradient(logits).tolist(),
    }


def _topk(table: Table, params: Params) -> Outputs:
    teacher = table.raw("teacher_topk_logprobs").flatten(0, 1)
    ids = table.raw("teacher_topk_ids").flatten(0, 1).long()
    how = {"direction": params["kl_type"], "floor": params["kl_type"] == "forward"}
    how |= given(params, mixed_weight="mixed_kl_weight")
    outputs = _on_logits(table, lambda logits: topk_kl(logits, teacher, ids, **how).loss)
    mass = topk_kl(table.raw("student_logits").flatten(0, 1), teacher, ids, **how).student_mass
    return outputs | {"student_mass": table.padded(keep(mass, table.mask))}


def _gkd(table: Table, params: Params) -> Outputs:
    teacher = table.raw("teacher_logits").flatten(0, 1)
    how = given(params, jsd_beta="beta", jsd_temperature="temperature")
    return _on_logits(table, lambda logits: generalized_jsd(logits, teacher, **how))


def _opd(table: Table, params: Params) -> Outputs:
    if "trust_region_low" in params:
        arguments = given(params, trust_region_low="trust_region_low", kl_tau="kl_tau")
        return _loss(table, params, loss_sum(reverse_kl_policy_gradient, squared_log_ratio), arguments)
    if params["use_policy_gradient"]:
        clamp = given(params, advantage_clamp="loss_max_clamp")
        credit = returns.teacher_advantage(table["new_logprobs"], table["teacher_logprobs"], table.mask, **clamp)
        arguments = given(params, **CLIPS, dual_clip="dual_clip_c")
        return _loss(table, params, policy_losses.ppo_clip, arguments, advantages=credit)
    return _loss(table, params, distillation_term, given(params, distillation_estimator="estimator"))


def _ipo(table: Table, params: Params) -> Outputs:
    arguments = given(params, clip_low="threshold", clip_high="threshold", kl_tau="kl_tau")
    fixed: Params = {"sides": "both", "surrogate": "ratio", "ratio_cap": None}
    return _loss(table, params, loss_sum(policy_losses.dppo_tv, squared_log_ratio), fixed | arguments)


DPPO = {"clip_low": "clip_low", "clip_high": "clip_high", "ratio_cap": "dual_clip_c"}
RATIO_SURROGATE: Params = {"surrogate": "ratio", "ratio_cap": None}

REPLAYS: dict[str, Callable[[Table, Params], Outputs]] = {
    "aggregation/aggregation": _aggregation,
    "kl/kl_estimator": _kl,
    "kl/kl_controller": _kl_controller,
    "kl/kpop": _binary_kl,
    "advantage/grpo": _group_baseline,
    "advantage/dr_grpo": _group_baseline,
    "advantage/rloo": _episodes(advantages.group_baseline, scale="none", leave_one_out=True, singleton="reward"),
    "advantage/grpo_passk": _best_of_group,
    "advantage/gpg": _episodes(advantages.nonzero_scaled_baseline),
    "advantage/maxrl": _episodes(advantages.mean_normalized),
    "advantage/opo": _episodes(advantages.length_weighted_baseline),
    "advantage/flash_reinforce": _episodes(advantages.batch_baseline),
    "advantage/gdpo": _gdpo,
    "advantage/reinforce_pp": _credit(returns.discounted_returns, (), True, gamma="gamma"),
    "advantage/reinforce_pp_baseline": _whitened_baseline,
    "advantage/remax": _credit(returns.greedy_baseline, ("reward_baselines",), False),
    "advantage/gae": _credit(returns.gae, ("values",), True, gamma="gamma", lam="lam"),
    "advantage/vapo": _vapo_gae,
    "advantage/otb": _credit(returns.optimal_token_baseline, ("old_logprobs", "sum_pi_squared", "group_ids"), False),
    "advantage/prime": _prime,
    "advantage/opd": _opd_advantage,
    "advantage/whiten": _whiten_alone,
    "advantage/kl_in_reward": _kl_in_reward,
    "advantage/sppo": _centred_rewards,
    "advantage/dapo": _overlong,
    "advantage/prorl": _stop_properly,
    "reweight/pf_ppo": _resampling,
    "correction/m2po": _m2po,
    "correction/opsm": _opsm,
    **dict.fromkeys(
        [f"correction/{name}" for name in ("tis", "seq_tis", "icepop", "kpop", "sequence_masking", "rejection_sampling")],
        _correction,
    ),
    **dict.fromkeys(
        [
            f"policy_loss/{name}"
            for name in ("ppo", "grpo", "dr_grpo", "dapo", "tis", "seq_tis", "icepop", "kpop", "seq_mask_tis", "flash_reinforce")
        ]
        + ["policy_loss/openrlhf_seq_tv", "policy_loss/openrlhf_token_binary_kl"],
        _ppo,
    ),
    "policy_loss/gspo": _policy(sequence_losses.sequence_clip, **CLIPS),
    "policy_loss/luspo": _luspo,
    "policy_loss/rloo": _policy(sequence_losses.sequence_clip, {"ratio": "product", "gradient": "sequence"}, **CLIPS),
    "policy_loss/gmpo": _gmpo,
    "policy_loss/vespo": _policy(
        sequence_losses.variational_reinforce,
        **{name: name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    ),
    "policy_loss/sppo": _sppo,
    "policy_loss/cispo": _policy(policy_losses.cispo, **CLIPS),
    "policy_loss/sapo": _policy(policy_losses.sapo, tau_pos="tau_pos", tau_neg="tau_neg"),
    "policy_loss/reinforce": _policy(policy_losses.reinforce),
    "policy_loss/reinforce_tis": _policy(policy_losses.truncated_reinforce, ratio_low="low", ratio_high="high"),
    "policy_loss/topr": _policy(policy_losses.tapered_reinforce),
    "policy_loss/dro": _policy(policy_losses.mirror_descent, dro_beta="dro_beta"),
    "policy_loss/importance_sampling": _policy(policy_losses.importance_weighted),
    "policy_loss/dppo_tv": _policy(policy_losses.dppo_tv, **DPPO),
    "policy_loss/dppo_kl": _policy(policy_losses.dppo_kl, **DPPO),
    "policy_loss/prime_rl_default": _policy(
        loss_sum(policy_losses.dppo_tv, squared_log_ratio), RATIO_SURROGATE, kl_tau="kl_tau", **DPPO
    ),
    "policy_loss/prime_rl_ipo": _ipo,
    "policy_loss/kl_cov": _kl_cov,
    "policy_loss/vapo": _vapo,
    "value_loss/ppo": _value,
    "sft/sft": _policy(negative_log_likelihood),
    "dpo/dpo": _preference,
    "dpo/sppo": _preference,
    "reward_model_loss/reward_model": _reward_model,
    "reward_model_loss/prime": _implicit_reward,
    "metric/prime": _implicit_accuracy,
    "distillation/distillation": _topk,
    "distillation/gkd": _gkd,
    "distillation/opd": _opd,
}
