"""From a golden case to calls of Tandem's public functions: names and shapes are translated, and nothing is computed here.

A case holds padded [B, T] tables; Tandem takes packed tokens, so a table is read row after row, with T tokens a row and
its mask. `replay(case)` gives what the case lists under `outputs`, in float64. Where a case follows a peer's choice that
is not Tandem's default, the choice is a named parameter here. A parameter that nothing reads is a KeyError: see `UNREAD`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args

import torch
from torch import Tensor

from tandem.algos import advantages, corrections, policy_losses, preferences, returns, selection, sequence_losses, shaping, values
from tandem.algos.aggregation import Aggregation, aggregate, loss_weights, mean_over
from tandem.algos.checks import keep
from tandem.algos.composition import inputs_of, loss_sum, parts_of, types_of
from tandem.algos.distillation import generalized_jsd, topk_kl
from tandem.algos.extra_terms import kl_estimate, positive_nll, reverse_kl_policy_gradient, squared_log_ratio
from tandem.algos.kl import KLEstimator, KLGradient, adapted_kl_coef, kl_divergence
from tandem.algos.ratios import bounded, log_ratio
from tandem.algos.segments import row_counts, row_sum
from tandem.algos.supervised import negative_log_likelihood
from tandem.algos.terms import LossFunction, LossInputs, TokenLoss
from tandem.trainer.workers import mismatch

Case = dict[str, Any]
Params = dict[str, Any]
Outputs = dict[str, Any]

UNREAD = {
    "group_size": "the ids say it",
    "baseline": "it names the algorithm",
    "want_returns": "returns are always given",
    "advantage/vapo lam": "lam_value and lam_policy take its place",
    "clip_low": "there is nothing to clip, as in REINFORCE and in an estimator of KL as the loss",
    "clip_high": "likewise",
    "dual_clip_c": "likewise",
    "scale_factor": "only one aggregation is divided by it",
}
"""Parameters without a meaning for some or for all functions, of one function where it is named, and why."""


def replay(case: Case) -> Outputs:
    """The outputs of a case, by their canonical names.

    Raises KeyError for a function that Tandem does not have, and for a parameter, other than null, that says what nothing
    here listens to.
    """
    name, params = f"{case['function_kind']}/{case['algorithm']}", _Heard(case["params"])
    outputs = REPLAYS[name](Table(case), params)
    if unread := [each for each in params.unread() if each not in UNREAD and f"{name} {each}" not in UNREAD]:
        raise KeyError(f"{name} has no use for parameter {', '.join(unread)}")
    return outputs


class _Heard(dict[str, Any]):
    """Parameters of a case, which remember which of them were asked for."""

    def __init__(self, params: Params) -> None:
        super().__init__({name: _Heard(value) if isinstance(value, dict) else value for name, value in params.items()})
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        return super().get(name, default)

    def unread(self) -> list[str]:
        """Those of mappings in it among them; null is off, and nobody needs to know."""
        found = [name for name, value in self.items() if value is not None and name not in self._asked]
        return [*found, *(name for value in self.values() if isinstance(value, _Heard) for name in value.unread())]


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

    def weights(
        self, params: Params, mask: Tensor | None = None, ranks: int = 1, usual: Aggregation = "seq-mean-token-mean"
    ) -> Tensor:
        """A missing scale factor is the padded width by the convention of these cases, not of Tandem."""
        mode = params.get("agg") or usual
        constant = (params.get("scale_factor") or self.shape[1]) if mode == "seq-mean-token-sum-norm" else None
        counted = self.mask if mask is None else mask
        totals = given(loss_weights, params, num_tokens="batch_num_tokens", num_rows="global_batch_size")
        return loss_weights(counted, self.lengths, aggregation=mode, length_constant=constant, ranks=ranks, **totals)


def given(function: Callable[..., Any], params: Mapping[str, Any], **names: str) -> Params:
    """The parameters of `function` that a case sets, under Tandem's names: `tandem_name="canonical_name"`.

    Null is off where the function can be told so, and its default elsewhere.
    """
    types = types_of(function)
    set_here = {mine: params[theirs] for mine, theirs in names.items() if mine in types and theirs in params}
    return {name: value for name, value in set_here.items() if value is not None or NoneType in get_args(types[name])}


def same_names(function: Callable[..., Any], params: Mapping[str, Any]) -> Params:
    """The parameters of a case that has them under Tandem's names."""
    return given(function, params, **{name: name for name in params})


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def groups_of(table: Table, params: Params) -> Tensor:
    """Ids of groups; where a case does not list them they stand one after another, and the first row of each is its id."""
    if "group_ids" in table.inputs:
        return table.groups
    size = params["group_size"]
    return torch.arange(table.shape[0]).view(-1, size)[:, :1].expand(-1, size).flatten()


# ----------------------------------------------------------------------------------------------- aggregation, KL


def _aggregation(table: Table, params: Params) -> Outputs:
    losses = table["loss_mat"].requires_grad_()
    loss = aggregate(losses, table.weights(params), table.mask)
    loss.backward()
    split = table.weights(params, ranks=params.get("dp_size") or 1)
    parts = params.get("row_parts") or [list(range(table.shape[0]))]
    by_row = [value.view(table.shape) for value in (losses.detach(), split, table.mask)]
    return {
        "loss": loss.item(),
        "grad_loss_mat": table.padded(gradient(losses)),
        "part_losses": [aggregate(*(value[rows].flatten() for value in by_row)).item() for rows in parts],
    }


KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_names(name: str, params: Params, prefix: str = "") -> Params:
    """An estimator and its gradient from a peer's name, in which "+" is the straight-through gradient."""
    plain = name.removesuffix("+")
    chosen = "direct" if plain == name else "straight_through"
    chosen = "weighted" if params.get("is_weighted") or params.get("kl_is_correction") else chosen
    chosen = "unbiased" if params.get("unbiased_gradient") else chosen
    return {f"{prefix}estimator": KL_NAMES.get(plain, plain), f"{prefix}gradient": chosen}


def _kl(table: Table, params: Params) -> Outputs:
    logprobs = table["new_logprobs"].requires_grad_()
    columns = {name: keep(column, table.mask) for name, column in table.columns().items() if name != "new_logprobs"}
    kl = kl_divergence(
        keep(logprobs, table.mask),
        columns["ref_logprobs"],
        old_logprobs_N=columns.get("old_logprobs"),
        **kl_names(params["estimator"], params),
    )
    kl = keep(kl, table.mask)
    kl.sum().backward()
    return {"kl": table.padded(kl), "grad_new_logprobs": table.padded(gradient(logprobs))}


def _kl_controller(table: Table, params: Params) -> Outputs:
    how = given(adapted_kl_coef, params, target="target", horizon="horizon", num_steps="n_steps")
    if params.get("target") is None:
        return {"coef_history": [params["init"] for _ in params["kl_sequence"]]}
    history = [params["init"]]
    for kl in params["kl_sequence"]:
        history.append(adapted_kl_coef(history[-1], kl, **how))
    return {"coef_history": history[1:]}


def _binary_kl(table: Table, params: Params) -> Outputs:
    trained, sampled = table["old_logprobs"], table["rollout_logprobs"]
    return {
        "kl_train_rollout": table.padded(keep(corrections.binary_kl(trained, sampled), table.mask)),
        "kl_rollout_train": table.padded(keep(corrections.binary_kl(sampled, trained), table.mask)),
    }


# --------------------------------------------------------------------------------------------------- advantages


def _episodes(function: Callable[..., Tensor], fixed: Params | None = None, **names: str) -> Callable[[Table, Params], Outputs]:
    """One advantage a row, from rewards and groups, spread over the row's tokens; `fixed` are the choices of a peer."""

    def run(table: Table, params: Params) -> Outputs:
        found = {"rewards_B": table["rewards"], "token_counts_B": row_counts(table.mask, table.lengths)}
        found["groups_B"] = table.groups if "group_ids" in table.inputs else torch.zeros(len(table.lengths))
        positional = {name: found[name] for name in found if name in inputs_of(function)}
        chosen = {**(fixed or {}), **given(function, params, **names, singleton="singleton")}
        return {"advantages": table.padded(table.spread(function(**positional, **chosen)))}

    return run


def _group_baseline(divides: bool) -> Callable[[Table, Params], Outputs]:
    """divides: by the deviation where a case does not say. A group of one has its raw reward, but in peers that give it 0."""
    names = {"std_eps": "eps", "ddof": "ddof", "leave_one_out": "leave_one_out"}
    scales = {None: "group", True: "group", False: "none"}

    def run(table: Table, params: Params) -> Outputs:
        scale = "group" if params.get("norm_by_std", divides) else "none"
        if "scale_rewards" in params:
            scale = scales.get(params["scale_rewards"], params["scale_rewards"])
        zero = "scale_rewards" in params or params.get("leave_one_out")
        fixed = {"scale": scale, "singleton": "zero" if zero else "reward"}
        return _episodes(advantages.group_baseline, fixed, **names)(table, params)

    return run


def _best_of_group(table: Table, params: Params) -> Outputs:
    scale = "group" if params.get("norm_by_std", True) else "none"
    return _episodes(advantages.best_of_group, {"scale": scale}, std_eps="eps")(table, params)


def _whitened_baseline(table: Table, params: Params) -> Outputs:
    of_group = advantages.group_baseline(table["rewards"].double(), table.groups, scale="none", singleton="reward")
    return {"advantages": table.padded(_whiten(table.spread(of_group), table, params))}


def _gdpo(table: Table, params: Params) -> Outputs:
    names = {"reward_weights": "reward_weights", "std_eps": "eps", "ddof": "ddof", "singleton": "singleton"}
    chosen = given(advantages.decoupled_normalization, params, **names)
    of_components = advantages.decoupled_normalization(
        table.raw("reward_components"), table.groups, **{"singleton": "reward"} | chosen
    )
    return {"advantages": table.padded(_whiten(table.spread(of_components), table, params))}


def _whiten(values_N: Tensor, table: Table, params: Params, usual: bool = True) -> Tensor:
    how, whitens = given(returns.whiten, params, whiten_ddof="whiten_ddof"), params.get("whiten")
    return returns.whiten(values_N, table.mask, **how) if (usual if whitens is None else whitens) else values_N


def _whiten_alone(table: Table, params: Params) -> Outputs:
    chosen = given(returns.whiten, params, whiten_ddof="ddof", whiten_eps="eps")
    if params.get("unbiased") is False:
        chosen["whiten_ddof"] = 0
    return {"whitened": table.padded(returns.whiten(table["x"], table.mask, **chosen))}


def _token_rewards(table: Table, params: Params) -> Tensor:
    if "token_rewards" in table.inputs:
        return table["token_rewards"]
    logprobs = [table[name] for name in ("old_logprobs", "ref_logprobs") if name in table.inputs]
    penalty = params.get("kl_type") or params.get("kl_penalty") or "k1"
    return returns.token_rewards(
        table["rewards"],
        table.mask,
        table.lengths,
        *(logprobs if params.get("kl_coef") else ()),
        **given(returns.token_rewards, params, reward_kl_coef="kl_coef"),
        reward_kl_estimator=kl_names(penalty, {})["estimator"],
    )


def _kl_in_reward(table: Table, params: Params) -> Outputs:
    return {"token_rewards": table.padded(_token_rewards(table, params))}


def _credit(
    function: Callable[..., returns.Credit], columns: tuple[str, ...], whitens: bool, fixed: Params | None = None, **names: str
) -> Callable[[Table, Params], Outputs]:
    """Advantages and returns, token by token; `columns` are the inputs between the token rewards and the mask."""

    def run(table: Table, params: Params) -> Outputs:
        middle = [table.groups if name == "group_ids" else table[name] for name in columns]
        chosen = {**(fixed or {}), **given(function, params, **names, singleton="singleton")}
        credit = function(_token_rewards(table, params), *middle, table.mask, table.lengths, **chosen)
        found = _whiten(credit.advantages, table, params, whitens)
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
        groups_of(table, params),
        table.mask,
        table.lengths,
        **given(returns.process_and_outcome, params, process_coef="reward_dpo_coef", outcome_coef="reward_gt_coef"),
    )
    return {"advantages": table.padded(_whiten(credit.advantages, table, params)), "returns": table.padded(credit.returns)}


def _opd_advantage(table: Table, params: Params) -> Outputs:
    student, teacher = table["old_logprobs"], table["teacher_logprobs"]
    if "opd_kl_coef" not in params:
        return {"advantages": table.padded(returns.teacher_advantage(student, teacher, table.mask))}
    how = given(returns.reverse_kl, params, distillation_coef="opd_kl_coef")
    found = returns.reverse_kl(table["advantages"], student, teacher, table.mask, **how)
    return {"advantages": table.padded(found)}


def _centred_rewards(table: Table, params: Params) -> Outputs:
    return {
        "centered_rewards": advantages.soft_mean_centred(
            table["rewards"], **given(advantages.soft_mean_centred, params, soft_mean_beta="beta")
        ).tolist()
    }


def _overlong(table: Table, params: Params) -> Outputs:
    found = shaping.overlong_penalty(table["rewards"], table["response_lengths"], **same_names(shaping.overlong_penalty, params))
    return {"rewards": found.tolist()}


def _stop_properly(table: Table, params: Params) -> Outputs:
    how = same_names(shaping.stop_properly, params)
    return {"rewards": shaping.stop_properly(table["rewards"], table["truncated"], **how).tolist()}


def _resampling(table: Table, params: Params) -> Outputs:
    how = same_names(shaping.resampling_weights, params)
    weights = shaping.resampling_weights(row_sum(table["token_scores"], table.mask, table.lengths), **how)
    return {
        "resample_weights": weights.tolist(),
        "resample_probabilities": shaping.resampling_probabilities(weights).tolist(),
    }


# -------------------------------------------------------------------------------------------------- corrections


AREAL_FLOOR = 1e-8
"""The peer's floor, run in float64; in float32 it would round to certainty."""


UNBOUNDED = sys.float_info.max
"""What a null upper bound is; a null lower one is 0."""


def _corrected(table: Table, params: Params) -> corrections.Correction:
    chosen = params["correction"]
    old, rollout, mask, lengths = table["old_logprobs"], table["rollout_logprobs"], table.mask, table.lengths

    def gate(function: Callable[..., corrections.Correction], **fixed: Any) -> corrections.Correction:
        how = {name: chosen[name] for name in (*types_of(function), "batch_normalize") if name in chosen}
        how |= {name: none for name, none in (("low", 0.0), ("high", UNBOUNDED)) if how.get(name, 0) is None}
        how |= {name: params[name] for name in ("log_ratio_clamp",) if name in params}
        columns = (old, rollout, mask, lengths)[: len(inputs_of(function))]
        return function(*columns, **given(function, how, normalize="batch_normalize") | same_names(function, how) | fixed)

    match chosen["kind"]:
        case "token_tis":
            return gate(corrections.token_tis)
        case "seq_tis":
            return gate(corrections.seq_tis)
        case "token_icepop":
            return gate(corrections.icepop)
        case "kpop":
            return gate(corrections.kpop, probability_floor=AREAL_FLOOR)
        case "seq_mask_tis":
            return gate(corrections.seq_mask_tis)
        case "token_binary_kl" | "token_tv" as kind:
            return gate(corrections.token_trust_region, divergence=kind.removeprefix("token_"))
        case "seq_binary_kl" | "seq_tv" as kind:
            return gate(corrections.sequence_trust_region, divergence=kind.removeprefix("seq_"))
        case "seq_geo_mask":
            return gate(corrections.sequence_mask, ratio="geometric")
        case "seq_product_mask":
            return gate(corrections.sequence_mask, ratio="product")
        case "outlier_seq_mask":
            return gate(corrections.sequence_mask, ratio="outlier")
        case "m2po":
            return gate(corrections.m2po)
        case "rs":
            return gate(corrections.rejection_sampling, **_tests(chosen))
        case kind:
            raise KeyError(f"correction {kind}")


def _tests(chosen: Params) -> Params:
    """Modes and thresholds as Tandem spells them; a pair of numbers for one mode is its two bounds."""
    modes = listed(chosen.get("mode") or "token_k1")
    bounds = [str(bound) for bound in listed(chosen.get("threshold") or "0.5_2.0")]
    separator = "_" if len(modes) == 1 else ","
    return {"mode": ",".join(modes), "threshold": separator.join(bounds)}


def listed(value: Any) -> list[Any]:
    """A list, or one value as a list; a text holds its values between commas."""
    return value if isinstance(value, list) else value.split(",") if isinstance(value, str) else [value]


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
    found = corrections.m2po(table["old_logprobs"], table["rollout_logprobs"], table.mask, **same_names(corrections.m2po, params))
    return {"keep_mask": table.padded(found.kept.double())}


def _opsm(table: Table, params: Params) -> Outputs:
    """The peer compares the current policy with the start of the update; Tandem's arguments are any two policies."""
    columns = (table["new_logprobs"], table["old_logprobs"], table["advantages"])
    found = corrections.off_policy_sequence_mask(
        *columns, table.mask, table.lengths, **same_names(corrections.off_policy_sequence_mask, params)
    )
    return {"keep_mask": table.padded(found.kept.double())}


# ------------------------------------------------------------------------------------------------ policy losses


CLIPS = {name: name for name in ("clip_low", "clip_high", "log_ratio_clamp", "ratio_cap")} | {"dual_clip": "dual_clip_c"}
"""What a policy loss may take, and what the cases call it."""


def _chosen(function: LossFunction, params: Params, **names: str) -> Params:
    """The parameters of a policy loss that a case sets; `names` are those that are not in `CLIPS`."""
    return given(function, params, **CLIPS) | given(function, params, ratio_cap="delta") | given(function, params, **names)


def _policy(function: LossFunction, fixed: Params | None = None, **names: str) -> Callable[[Table, Params], Outputs]:
    """A policy loss; `names` are its parameters and what the cases call them, `fixed` the choices of a peer."""

    def run(table: Table, params: Params) -> Outputs:
        return _loss(table, params, function, {**(fixed or {}), **_chosen(function, params, **names)})

    return run


def _loss(
    table: Table,
    params: Params,
    function: LossFunction,
    arguments: Params,
    usual: Aggregation = "seq-mean-token-mean",
    **more: Tensor,
) -> Outputs:
    """With a correction that rejects, the tokens that it drops count nowhere (verl); with others they stay in the denominator."""
    columns, mask = table.columns() | more, table.mask
    kl = _kl_arguments(params, params.get("kl_coef") or 1.0)
    metrics: dict[str, float] = {}
    outputs: Outputs = {}
    if params.get("correction"):
        correction = _corrected(table, params)
        columns["correction"] = correction.column
        outputs["weights"] = table.padded(correction.column)
        filtered = (correction.metrics or {}).get("correction_filtered")
        metrics["filter_fraction"] = filtered.value if filtered else 0.0
        gap = mismatch(table["rollout_logprobs"], table["old_logprobs"], table.mask)
        metrics["kl_rollout_old_k1_mean"] = gap["mismatch/k1"].value
        mask = correction.kept if params["correction"]["kind"] == "rs" else mask
    if params.get("kl_coef"):
        function, arguments = loss_sum(*parts_of(function), reference_kl), arguments | kl
    logprobs = table["new_logprobs"].requires_grad_()
    result: TokenLoss = function(LossInputs(logprobs, mask, table.lengths, columns), **arguments)
    weights = table.weights(params, mask, usual=usual)
    loss = aggregate(result.loss, weights, mask)
    loss.backward()
    measured = result.metrics.values_by_name()
    metrics |= {theirs: measured.get(mine, 0.0) for theirs, mine in METRIC_NAMES.items()}
    if "ref_logprobs" in table.inputs:
        estimate = reference_kl(LossInputs(logprobs.detach(), mask, table.lengths, columns), **kl | {"kl_coef": 1.0})
        metrics["kl_loss"] = aggregate(estimate.loss, weights, mask).item()
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


def reference_kl(inputs: LossInputs, *, kl_coef: float, kl_estimator: KLEstimator, kl_gradient: KLGradient) -> TokenLoss:
    """The formula of any estimator, also of those that do not work inside a loss and that a row of the table refuses."""
    return kl_estimate(inputs, "kl", "ref_logprobs", kl_coef, kl_estimator, kl_gradient)


def teacher_kl(
    inputs: LossInputs, *, kl_estimator: KLEstimator, kl_gradient: KLGradient, loss_clamp: float | None = None
) -> TokenLoss:
    return kl_estimate(inputs, "distillation", "teacher_logprobs", 1.0, kl_estimator, kl_gradient, clamp=loss_clamp)


def _kl_arguments(params: Params, coef: float) -> Params:
    return {"kl_coef": coef} | kl_names(params.get("kl_type") or "k3", params, "kl_")


def _kl_cov(table: Table, params: Params) -> Outputs:
    columns = (table["new_logprobs"], table["advantages"], table.mask)
    covariant = selection.most_covariant(*columns, **given(selection.most_covariant, params, cov_frac="kl_cov_ratio"))
    arguments = _chosen(policy_losses.kl_cov, params, cov_kl_coef="ppo_kl_coef")
    outputs = _loss(table, params, policy_losses.kl_cov, arguments, most_covariant=covariant.double())
    outputs["metrics"]["kl_old_new_k1_mean"] = outputs["measured"]["abs_log_ratio"]  # the peer measures this one
    return outputs


def _gmpo(table: Table, params: Params) -> Outputs:
    """The peer counts what leaves the range on either side, apart by the sign of the advantage."""
    outputs = _policy(sequence_losses.geometric_mean)(table, params)
    measured = outputs["measured"]
    outputs["metrics"] |= {
        "clip_fraction": measured["outside_fraction_positive"],
        "dual_clip_fraction": measured["outside_fraction_negative"],
    }
    return outputs


def _luspo(table: Table, params: Params) -> Outputs:
    function = sequence_losses.sequence_clip
    return _loss(table, params, function, _chosen(function, params), "seq-mean-token-sum")


def _vapo(table: Table, params: Params) -> Outputs:
    positive = advantages.spread(table["rewards"], table.mask, table.lengths) > 0
    scale = mean_over(positive, table.weights(params))
    function = loss_sum(policy_losses.ppo_clip, positive_nll)
    arguments = _chosen(function, params, positive_nll_weight="positive_nll_weight")
    outputs = _loss(table, params, function, arguments, positive_scale=scale)
    if not positive.any():
        outputs["metrics"]["positive_nll_loss"] = 0.0  # of no token; Tandem measures nothing then
    return outputs


def _sppo(table: Table, params: Params) -> Outputs:
    centred = table.spread(table["centered_rewards"])
    function = sequence_losses.squared_preference
    outputs = _loss(table, params, function, _chosen(function, params, eta="eta"), advantages=centred)
    difference = log_ratio(table["new_logprobs"], table["old_logprobs"], None)
    outputs["log_ratios"] = row_sum(difference, table.mask, table.lengths).tolist()
    return outputs


def _value(table: Table, params: Params) -> Outputs:
    predicted = table["values"].requires_grad_()
    how = given(values.value_loss, params, value_clip="clip", value_scale="scale", huber_delta="huber_delta")
    result = values.value_loss(predicted, table["old_values"], table["returns"], table.mask, **how)
    loss = aggregate(result.loss, table.weights(params), table.mask)
    loss.backward()
    fraction = result.metrics.values_by_name().get("value_clip_fraction", 0.0)
    return {"loss": loss.item(), "grad_values": table.padded(gradient(predicted)), "metrics": {"clip_fraction": fraction}}


# ------------------------------------------------------------------------------------------ pairs, distillation


def _preference(table: Table, params: Params) -> Outputs:
    logprobs = table.raw("policy_seq_logps").requires_grad_()
    kind = params.get("loss_type") or "sigmoid"  # peers read lengths and label smoothing where the kind has a use for them
    lengths = table.raw("completion_lens") if kind == "ipo" and "completion_lens" in table.inputs else None
    how = given(preferences.preference_loss, params, beta="beta", label_smoothing="label_smoothing")
    if kind not in ("sigmoid", "robust"):
        how.pop("label_smoothing", None)
    result = preferences.preference_loss(logprobs, table.raw("ref_seq_logps"), lengths, preference=kind, **how)
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
    if (kind := params.get("loss_type") or "sigmoid") not in ("sigmoid", "logexp"):
        raise KeyError(f"reward model loss {kind}")
    scores = table.raw("rewards_pair").requires_grad_()
    margin = table["margin"] if "margin" in table.inputs else None
    how = given(preferences.reward_model_loss, params, centre_coef="center_rewards_coefficient")
    result = preferences.reward_model_loss(scores, margin, **how)
    result.loss.mean().backward()
    return {
        "loss": result.loss.mean().item(),
        "grad_rewards_pair": gradient(scores).tolist(),
        "metrics": {"accuracy": result.accuracy.item()},
    }


def _implicit_reward(table: Table, params: Params) -> Outputs:
    implicit = table["implicit_q"].requires_grad_()
    of_row = row_sum(implicit, table.mask, table.lengths)
    how = given(preferences.implicit_reward_loss, params, implicit_beta="beta")
    loss = preferences.implicit_reward_loss(of_row, table["acc"], **how).mean()
    loss.backward()
    return {"loss": loss.item(), "grad_implicit_q": table.padded(gradient(implicit))}


def _implicit_accuracy(table: Table, params: Params) -> Outputs:
    groups = groups_of(table, params)
    of_row = row_sum(table["implicit_q"], table.mask, table.lengths)
    pairs, absolute = preferences.implicit_reward_accuracy(of_row, table["acc"], groups)
    return {"metrics": {"dpo_accuracy": pairs.item(), "dpo_abs_accuracy": absolute.item()}}


def _on_logits(table: Table, params: Params, losses_of: Callable[[Tensor], Tensor]) -> Outputs:
    logits = table.raw("student_logits").requires_grad_()
    losses = losses_of(logits.flatten(0, 1))
    loss = aggregate(losses, table.weights(params, usual="token-mean"), table.mask)
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
    how |= given(topk_kl, params, mixed_weight="mixed_kl_weight", logprob_floor="log_prob_min_clamp")
    clamp = params.get("loss_max_clamp")
    outputs = _on_logits(table, params, lambda logits: bounded(topk_kl(logits, teacher, ids, **how).loss, clamp))
    mass = topk_kl(table.raw("student_logits").flatten(0, 1), teacher, ids, **how).student_mass
    return outputs | {"student_mass": table.padded(keep(mass, table.mask))}


def _gkd(table: Table, params: Params) -> Outputs:
    teacher = table.raw("teacher_logits").flatten(0, 1)
    how = given(generalized_jsd, params, jsd_beta="beta", jsd_temperature="temperature")
    return _on_logits(table, params, lambda logits: generalized_jsd(logits, teacher, **how))


def _opd(table: Table, params: Params) -> Outputs:
    if "trust_region_low" in params:
        function = loss_sum(reverse_kl_policy_gradient, squared_log_ratio)
        return _policy(function, trust_region_low="trust_region_low", kl_tau="kl_tau")(table, params)
    estimator = params.get("estimator")
    if params.get("use_policy_gradient"):
        if (estimator or "k1") not in ("k1", "kl"):
            raise KeyError(f"a policy gradient of the estimator {estimator}")
        clamp = given(returns.teacher_advantage, params, advantage_clamp="loss_max_clamp")
        credit = returns.teacher_advantage(table["new_logprobs"], table["teacher_logprobs"], table.mask, **clamp)
        return _loss(table, params, policy_losses.ppo_clip, _chosen(policy_losses.ppo_clip, params), advantages=credit)
    how = kl_names(estimator or "k3", params, "kl_") | given(teacher_kl, params, loss_clamp="loss_max_clamp")
    return _loss(table, params, teacher_kl, how)


def _ipo(table: Table, params: Params) -> Outputs:
    fixed: Params = {"sides": "both", "surrogate": "ratio", "ratio_cap": None}
    names = {"clip_low": "threshold", "clip_high": "threshold", "kl_tau": "kl_tau"}
    return _policy(loss_sum(policy_losses.dppo_tv, squared_log_ratio), fixed, **names)(table, params)


DPPO = {"ratio_cap": "dual_clip_c"}
RATIO_SURROGATE: Params = {"surrogate": "ratio", "ratio_cap": None}

REPLAYS: dict[str, Callable[[Table, Params], Outputs]] = {
    "aggregation/aggregation": _aggregation,
    "kl/kl_estimator": _kl,
    "kl/kl_controller": _kl_controller,
    "kl/kpop": _binary_kl,
    "advantage/grpo": _group_baseline(divides=True),
    "advantage/dr_grpo": _group_baseline(divides=False),
    "advantage/rloo": _episodes(advantages.group_baseline, {"scale": "none", "leave_one_out": True, "singleton": "reward"}),
    "advantage/grpo_passk": _best_of_group,
    "advantage/gpg": _episodes(advantages.nonzero_scaled_baseline, {"singleton": "reward"}),
    "advantage/maxrl": _episodes(advantages.mean_normalized, mean_eps="eps"),
    "advantage/opo": _episodes(advantages.length_weighted_baseline, {"singleton": "reward"}),
    "advantage/flash_reinforce": _episodes(advantages.batch_baseline),
    "advantage/gdpo": _gdpo,
    "advantage/reinforce_pp": _credit(returns.discounted_returns, (), True, gamma="gamma"),
    "advantage/reinforce_pp_baseline": _whitened_baseline,
    "advantage/remax": _credit(returns.greedy_baseline, ("reward_baselines",), False, gamma="gamma"),
    "advantage/gae": _credit(returns.gae, ("values",), True, gamma="gamma", lam="lam"),
    "advantage/vapo": _vapo_gae,
    "advantage/otb": _credit(
        returns.optimal_token_baseline,
        ("old_logprobs", "sum_pi_squared", "group_ids"),
        False,
        {"singleton": "reward"},
        baseline_eps="eps",
    ),
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
        _policy(policy_losses.ppo_clip),
    ),
    "policy_loss/gspo": _policy(sequence_losses.sequence_clip),
    "policy_loss/luspo": _luspo,
    "policy_loss/rloo": _policy(sequence_losses.sequence_clip, {"ratio": "product", "gradient": "sequence"}),
    "policy_loss/gmpo": _gmpo,
    "policy_loss/vespo": _policy(
        sequence_losses.variational_reinforce,
        **{name: name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    ),
    "policy_loss/sppo": _sppo,
    "policy_loss/cispo": _policy(policy_losses.cispo),
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
