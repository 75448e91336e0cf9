"""What a case asks for reaches the function: one literal value for each parameter, worked out by hand."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.golden.replay import UNREAD, Outputs, Params, replay
from tests.golden.test_golden import CORPUS, cases_in

E = math.e


def run(name: str, params: dict[str, Any], **inputs: Any) -> Outputs:
    kind, _, algorithm = name.partition("/")
    return replay({"function_kind": kind, "algorithm": algorithm, "params": params, "inputs": inputs})


def near(got: Any, want: Any) -> None:
    wanted = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), wanted, rtol=1e-6, atol=1e-7)


def one_token(name: str, params: dict[str, Any], x: float, o: float, advantage: float, **more: Any) -> Outputs:
    columns = {"new_logprobs": [[x]], "old_logprobs": [[o]], "advantages": [[advantage]], "mask": [[1]]}
    return run(f"policy_loss/{name}", params, **columns | more)


def test_the_variance_of_whitening_is_that_of_the_case() -> None:
    got = run("advantage/whiten", {"unbiased": False}, x=[[1.0, 2.0, 4.0]], mask=[[1, 1, 1]])
    near(got["whitened"], [[-4 / math.sqrt(14), -1 / math.sqrt(14), 5 / math.sqrt(14)]])


@pytest.mark.parametrize(("name", "want"), [("k1", 0.5), ("kl", 0.5), ("k2", 0.75), ("mse", 0.75), ("abs", 0.5), (None, 0.5)])
@pytest.mark.parametrize("key", ["kl_type", "kl_penalty"])
def test_a_penalty_in_the_reward_has_its_estimator(key: str, name: str | None, want: float) -> None:
    columns = {"rewards": [1.0], "old_logprobs": [[-1.0]], "ref_logprobs": [[-2.0]], "mask": [[1]]}
    near(run("advantage/kl_in_reward", {"kl_coef": 0.5, key: name}, **columns)["token_rewards"], [[want]])


PAIR = {"rewards": [1.0, 0.0], "group_ids": [4, 4], "mask": [[1], [1]]}
ALONE = {"rewards": [3.0], "group_ids": [4], "mask": [[1]]}


@pytest.mark.parametrize(
    ("name", "params", "inputs", "want"),
    [
        ("maxrl", {"eps": 0.5}, PAIR, [[0.5], [-0.5]]),
        ("grpo_passk", {"eps": 1.0}, PAIR, [[1 / (1 + math.sqrt(0.5))], [0.0]]),
        ("grpo", {"eps": 0.5, "ddof": 0}, PAIR, [[0.5], [-0.5]]),
        ("grpo", {"eps": 0.0}, PAIR, [[math.sqrt(0.5)], [-math.sqrt(0.5)]]),
        ("grpo", {"scale_rewards": None, "eps": 0.0}, PAIR, [[math.sqrt(0.5)], [-math.sqrt(0.5)]]),
        ("grpo", {"scale_rewards": False}, PAIR, [[0.5], [-0.5]]),
        ("dr_grpo", {}, PAIR, [[0.5], [-0.5]]),
        ("grpo", {}, ALONE, [[3.0]]),
        ("grpo", {"singleton": "zero"}, ALONE, [[0.0]]),
        ("grpo", {"scale_rewards": "batch"}, ALONE, [[0.0]]),
        ("grpo", {"leave_one_out": True}, ALONE, [[0.0]]),
        ("opo", {}, ALONE, [[3.0]]),
        ("opo", {"singleton": "zero"}, ALONE, [[0.0]]),
        ("gpg", {}, {"rewards": [3.0, 0.0], "group_ids": [4, 5], "mask": [[1], [1]]}, [[6.0], [0.0]]),
        ("gpg", {"singleton": "zero"}, ALONE, [[0.0]]),
        ("rloo", {}, ALONE, [[3.0]]),
        ("rloo", {"singleton": "zero"}, ALONE, [[0.0]]),
    ],
)
def test_estimators(name: str, params: dict[str, Any], inputs: dict[str, Any], want: list[list[float]]) -> None:
    near(run(f"advantage/{name}", params, **inputs)["advantages"], want)


def test_a_discount_reaches_the_returns_over_a_greedy_baseline() -> None:
    columns = {"token_rewards": [[1.0, 0.0, 2.0]], "reward_baselines": [0.5], "mask": [[1, 0, 1]]}
    got = run("advantage/remax", {"gamma": 0.5}, **columns)
    near(got["advantages"], [[1.5, 0.0, 1.5]])


@pytest.mark.parametrize(("params", "want"), [({}, 3.0), ({"singleton": "zero"}, 0.0)])
def test_a_row_alone_has_its_returns_where_the_peer_has_no_baseline(params: dict[str, Any], want: float) -> None:
    columns = {"old_logprobs": [[-1.0]], "sum_pi_squared": [[0.5]], "group_ids": [4], "mask": [[1]]}
    near(run("advantage/otb", params, rewards=[3.0], **columns)["advantages"], [[want]])


def test_groups_that_a_case_lists_are_those_of_prime() -> None:
    columns = {"process_rewards": [[0.0]] * 4, "acc": [1.0, 1.0, 0.0, 0.0], "group_ids": [1, 2, 1, 2], "mask": [[1]] * 4}
    got = run("advantage/prime", {"reward_dpo_coef": 0.0, "reward_gt_coef": 1.0, "whiten": False}, **columns)
    near(got["advantages"], [[1.0], [1.0], [-1.0], [-1.0]])


def test_components_have_the_deviation_of_the_case() -> None:
    columns = {"reward_components": [[1.0], [0.0]], "group_ids": [4, 4], "mask": [[1], [1]]}
    near(run("advantage/gdpo", {"eps": 0.5, "ddof": 0, "whiten": False}, **columns)["advantages"], [[0.5], [-0.5]])


@pytest.mark.parametrize(
    ("name", "params", "moved", "want"),
    [
        ("importance_sampling", {"log_ratio_clamp": 1.0}, 2.0, -E),
        ("importance_sampling", {"log_ratio_clamp": None}, 25.0, -(E**25)),
        ("sapo", {"log_ratio_clamp": 1.0}, 2.0, -4 / (1 + math.exp(1 - E))),
        ("kl_cov", {"log_ratio_clamp": 1.0, "ppo_kl_coef": 0.0}, 2.0, -E),
        ("topr", {"log_ratio_clamp": 1.0}, -2.0, 3 / E),
        ("reinforce_tis", {"log_ratio_clamp": 1.0, "low": None, "high": 9.0}, 2.0, E),
        ("dppo_tv", {"log_ratio_clamp": 1.0, "clip_high": 1.0}, 2.0, E),
        ("dppo_kl", {"log_ratio_clamp": 1.0, "clip_high": 9.0, "dual_clip_c": 2.0}, 2.0, 2.0),
        ("prime_rl_ipo", {"log_ratio_clamp": 1.0, "threshold": 1.0, "kl_tau": 0.0}, 2.0, -E),
        ("gmpo", {"log_ratio_clamp": 1.0, "clip_high": 9.0}, 2.0, -E),
        ("ppo", {"log_ratio_clamp": 1.0, "clip_high": 9.0}, 2.0, -E),
    ],
)
def test_a_clamp_reaches_every_loss(name: str, params: dict[str, Any], moved: float, want: float) -> None:
    x = -3.0 if moved < 0 else -1.0
    near(one_token(name, params, x, x - moved, 1.0, rewards=[-1.0])["loss"], want)


def test_bounds_of_a_ratio() -> None:
    doubled = (math.log(0.5), math.log(0.25), -1.0)
    near(one_token("ppo", {"dual_clip_c": 1.5}, *doubled)["loss"], 1.5)
    near(one_token("dapo", {"delta": 1.75}, *doubled)["loss"], 1.75)
    got = one_token("vapo", {"dual_clip_c": 1.5, "positive_nll_weight": 0.1}, *doubled, rewards=[0.0])
    near([got["loss"], got["metrics"]["positive_nll_loss"]], [1.5, 0.0])


@pytest.mark.parametrize(
    ("params", "value", "slope"),
    [
        ({"kl_type": "k1"}, 1.0, 1.0),
        ({"kl_type": "abs"}, 1.0, 1.0),
        ({"kl_type": "mse"}, 0.5, 1.0),
        ({}, 1 / E, 1 - 1 / E),
        ({"kl_type": "k3+"}, 1 / E, 1.0),
        ({"kl_type": "k1+"}, 1.0, 1.0),
        ({"unbiased_gradient": True}, 1 / E, 1.0),
        ({"kl_is_correction": True}, 1 / E, 1.0),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "cispo", "gspo", "sapo", "vapo", "reinforce"])
def test_a_pull_to_the_reference_joins_every_loss(name: str, params: dict[str, Any], value: float, slope: float) -> None:
    got = one_token(name, {"kl_coef": 0.1, **params}, -1.0, -1.0, 0.0, ref_logprobs=[[-2.0]], rewards=[0.0])
    near([got["loss"], got["metrics"]["kl_loss"], got["grad_new_logprobs"][0][0]], [0.1 * value, value, 0.1 * slope])


@pytest.mark.parametrize(("estimator", "want"), [("k1", 1.0), ("abs", 1.0), ("k2", 0.5), ("k3", 1 / E)])
def test_distillation_as_a_loss_takes_any_estimator(estimator: str, want: float) -> None:
    columns = {"new_logprobs": [[-1.0]], "old_logprobs": [[-1.0]], "teacher_logprobs": [[-2.0]], "mask": [[1]]}
    near(run("distillation/opd", {"estimator": estimator, "use_policy_gradient": False}, **columns)["loss"], want)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3+", "k1+", "abs"])
@pytest.mark.parametrize("garbage", [-math.inf, math.nan])
def test_what_is_masked_has_no_gradient(estimator: str, garbage: float) -> None:
    columns = {"new_logprobs": [[-1.0, garbage]], "ref_logprobs": [[-2.0, -1.0]], "mask": [[1, 0]]}
    got = run("kl/kl_estimator", {"estimator": estimator}, **columns)
    near(got["grad_new_logprobs"], [[1.0, 0.0]])


TWO = {
    "new_logprobs": [[-1.0, -1.0]],
    "old_logprobs": [[-1.0, -1.0]],
    "rollout_logprobs": [[-1.0, -1.0 - math.log(3)]],
    "advantages": [[1.0, 3.0]],
    "mask": [[1, 1]],
}


@pytest.mark.parametrize(
    "test",
    [
        {"threshold": 2},
        {"threshold": "2.0"},
        {"threshold": [0.5, 2.0], "mode": ["token_k1"]},
        {"threshold": [2.0, 0.1], "mode": ["token_k1", "token_k3"]},
        {"threshold": None, "mode": None},
    ],
)
def test_rejected_tokens_leave_the_denominator(test: dict[str, Any]) -> None:
    got = run("policy_loss/ppo", {"agg": "token-mean", "correction": {"kind": "rs", **test}}, **TWO)
    near([got["loss"], got["metrics"]["filter_fraction"]], [-1.0, 0.5])
    near(got["grad_new_logprobs"], [[-1.0, 0.0]])


@pytest.mark.parametrize(
    ("correction", "want"),
    [
        (None, -2.0),
        ({"kind": "token_icepop", "low": 0.5, "high": 2.0}, -0.5),
        ({"kind": "token_icepop", "low": None, "high": None}, -5.0),
        ({"kind": "token_tis", "low": None, "high": 2.0}, -3.5),
        ({"kind": "token_tis", "low": None, "high": 2.0, "batch_normalize": True}, -3.5 / 1.5),
        ({"kind": "token_tis", "low": None, "high": None}, -5.0),
        ({"kind": "seq_tis", "low": None, "high": None}, -6.0),
        ({"kind": "kpop", "low": None, "high": 9.0}, -5.0),
        ({"kind": "seq_mask_tis", "low": None, "high": None}, -5.0),
        ({"kind": "m2po", "m2_threshold": 0.04}, -0.5),
    ],
)
def test_corrections_inside_a_loss(correction: dict[str, Any] | None, want: float) -> None:
    near(run("policy_loss/ppo", {"agg": "token-mean", "correction": correction}, **TWO)["loss"], want)


@pytest.mark.parametrize(
    ("params", "want"),
    [({"clip": None, "scale": 1.0}, 9.0), ({"clip": None}, 4.5), ({"clip": None, "scale": 1.0, "huber_delta": 1.0}, 5.0)],
)
def test_the_scale_of_a_critics_loss(params: dict[str, Any], want: float) -> None:
    columns = {"values": [[3.0]], "old_values": [[3.0]], "returns": [[0.0]], "mask": [[1]]}
    got = run("value_loss/ppo", params, **columns)
    near([got["loss"], got["metrics"]["clip_fraction"]], [want, 0.0])


@pytest.mark.parametrize(("kind", "want"), [("hinge", 0.5), ("sppo_hard", 1.0), ("sigmoid", math.log(1 + math.exp(-0.5)))])
def test_pairs_ignore_what_their_kind_does_not_read(kind: str, want: float) -> None:
    smoothing = None if kind == "sigmoid" else 0.1
    columns = {"policy_seq_logps": [[1.0, 0.0]], "ref_seq_logps": [[0.0, 0.0]], "completion_lens": [[2, 3]]}
    got = run("dpo/dpo", {"loss_type": kind, "beta": 0.5, "label_smoothing": smoothing}, **columns)
    near(got["loss"], want)


def test_null_is_off() -> None:
    got = run("reward_model_loss/reward_model", {"center_rewards_coefficient": None}, rewards_pair=[[1.0, 1.0]])
    near(got["loss"], math.log(2))
    weights = run("reweight/pf_ppo", {"method": "max_min", "weight_pow": None}, token_scores=[[1.0], [2.0]], mask=[[1], [1]])
    near(weights["resample_probabilities"], [0.5, 0.5])
    assert run("kl/kl_controller", {"init": 0.2, "target": None, "kl_sequence": [1.0, 9.0]})["coef_history"] == [0.2, 0.2]
    columns = {"token_rewards": [[0.0, 1.0]], "mask": [[1, 1]]}
    near(run("advantage/reinforce_pp", {"gamma": None, "whiten": False}, **columns)["returns"], [[1.0, 1.0]])


def test_distillation_is_aggregated_as_the_case_says() -> None:
    logits = {"student_logits": [[[0.0, 0.0]] * 2], "teacher_logits": [[[100.0, 0.0]] * 2], "mask": [[1, 1]]}
    near(run("distillation/gkd", {"beta": 0.0}, **logits)["loss"], math.log(2))
    near(run("distillation/gkd", {"beta": 0.0, "agg": "seq-mean-token-sum"}, **logits)["loss"], 2 * math.log(2))


def test_the_lengths_of_responses_weigh_where_the_case_says() -> None:
    got = run("policy_loss/luspo", {}, **TWO)
    near([got["loss"], run("policy_loss/luspo", {"agg": "token-mean"}, **TWO)["loss"]], [-4.0, -2.0])


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"agg": "seq-mean-token-mean", "global_batch_size": 3}, 5 / 3),
        ({"agg": "seq-mean-token-mean", "global_batch_size": None}, 2.5),
        ({"agg": "seq-mean-token-sum", "global_batch_size": 4}, 2.5),
        ({"agg": "seq-mean-token-sum-norm", "global_batch_size": 4, "scale_factor": 5}, 0.5),
        ({"agg": "token-mean", "batch_num_tokens": 5.0}, 2.0),
        ({"agg": "token-mean", "batch_num_tokens": 5.0, "dp_size": 2}, 2.0),
    ],
)
def test_what_a_batch_counts_may_be_given(params: dict[str, Any], want: float) -> None:
    columns = {"loss_mat": [[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], "mask": [[1, 1], [1, 1], [0, 0]]}
    near(run("aggregation/aggregation", params, **columns)["loss"], want)


@pytest.mark.parametrize(
    ("name", "params", "inputs", "known"),
    [
        ("kl/kl_estimator", {"estimator": "k9"}, {"new_logprobs": [[0.0]], "ref_logprobs": [[0.0]], "mask": [[1]]}, "k1, abs, k2"),
        ("dpo/dpo", {"loss_type": "exo"}, {"policy_seq_logps": [[0.0, 0.0]], "ref_seq_logps": [[0.0, 0.0]]}, "sigmoid, robust"),
        ("advantage/grpo", {"scale_rewards": "row"}, PAIR, "group, batch, none"),
        ("advantage/opo", {"singleton": "one"}, PAIR, "zero, reward"),
        ("reweight/pf_ppo", {"method": "min"}, {"token_scores": [[1.0]], "mask": [[1]]}, "pow, max_min"),
        ("aggregation/aggregation", {"agg": "mean"}, {"loss_mat": [[1.0]], "mask": [[1]]}, "token-mean"),
    ],
)
def test_an_unknown_name_is_refused_with_those_there_are(
    name: str, params: dict[str, Any], inputs: dict[str, Any], known: str
) -> None:
    with pytest.raises(ValueError, match=f"is unknown; there are .*{known}"):
        run(name, params, **inputs)


@pytest.mark.parametrize(("clamp", "want"), [(None, [0.125, 0.5]), (0.25, [0.125, 0.25])])
def test_a_distillation_is_clamped_a_token(clamp: float | None, want: list[float]) -> None:
    columns = {"new_logprobs": [[-1.0, -2.0]], "teacher_logprobs": [[-1.5, -1.0]], "mask": [[1, 1]]}
    found = run("distillation/opd", {"estimator": "k2", "agg": "token-mean", "loss_max_clamp": clamp}, **columns)
    near(found["per_token_loss"], [want])
    student = [[0.25, 0.75]]
    logits = {"student_logits": [[[math.log(p) for p in row] for row in student]], "mask": [[1]]}
    teacher = {"teacher_topk_ids": [[[0, 1]]], "teacher_topk_logprobs": [[[math.log(0.75), math.log(0.25)]]]}
    params = {"kl_type": "forward", "agg": "token-mean", "loss_max_clamp": clamp}
    near(run("distillation/distillation", params, **logits, **teacher)["loss"], min(0.5 * math.log(3), clamp or 1.0))


NEVER_READ = {"group_size", "baseline", "want_returns"}
WITHOUT_EFFECT = {
    "advantage/dr_grpo ddof": "nothing is divided by it",
    "advantage/vapo lam": UNREAD["advantage/vapo lam"],
}


def settings(params: Params) -> Iterator[tuple[str, Params, Any]]:
    """(name, the mapping it stands in, value) of each parameter, a correction's own among them."""
    for name, value in params.items():
        yield from settings(value) if isinstance(value, dict) else [(name, params, value)]


def changed(value: Any) -> list[Any]:
    """Other values of a number or a switch."""
    return [not value] if isinstance(value, bool) else [value * 0.5 + 0.013, value * 0.01, -value - 1]


def outcome(case: dict[str, Any]) -> str:
    try:
        return repr(replay(case))
    except (ValueError, KeyError) as refused:
        return str(refused)


@pytest.mark.parametrize(
    ("name", "params", "inputs", "unread"),
    [
        ("advantage/rloo", {"group_size": 2, "shrinkage": 0.5}, PAIR, "shrinkage"),
        ("advantage/whiten", {"ddof": 1, "momentum": 0}, {"x": [[1.0, 2.0]], "mask": [[1, 1]]}, "momentum"),
        ("correction/tis", {"correction": {"kind": "token_tis", "high": 2.0, "mode": "seq"}}, TWO, "mode"),
        (
            "distillation/opd",
            {"estimator": "k3", "loss_min_clamp": 1.0},
            {**TWO, "teacher_logprobs": [[-1.0, -1.0]]},
            "loss_min_clamp",
        ),
    ],
)
def test_a_parameter_that_nothing_reads_is_refused(name: str, params: dict[str, Any], inputs: dict[str, Any], unread: str) -> None:
    with pytest.raises(KeyError, match=f"{name} has no use for parameter {unread}"):
        run(name, params, **inputs)


@pytest.mark.parametrize(
    ("name", "params", "inputs"),
    [
        ("reward_model_loss/reward_model", {"loss_type": "hinge"}, {"rewards_pair": [[1.0, 1.0]]}),
        ("distillation/opd", {"estimator": "k2", "use_policy_gradient": True}, {**TWO, "teacher_logprobs": [[-1.0, -1.0]]}),
        ("correction/tis", {"correction": {"kind": "token_pis"}}, TWO),
        ("policy_loss/reppo", {}, TWO),
    ],
)
def test_what_tandem_has_no_function_for_is_refused(name: str, params: dict[str, Any], inputs: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        run(name, params, **inputs)


def test_each_number_of_a_case_reaches_a_function() -> None:
    """Another one gives other outputs, or is refused, in one case of its kind at least: none is dropped on its way.

    Always of the corpus: TANDEM_GOLDEN_DIR may hold any cases.
    """
    reaches: defaultdict[str, bool] = defaultdict(bool)
    for case in cases_in(CORPUS):
        usual = outcome(case)
        for name, among, value in settings(case["params"]):
            place = f"{case['function_kind']}/{case['algorithm']} {name}"
            if not isinstance(value, bool | int | float) or name in NEVER_READ or reaches[place]:
                continue
            for other in changed(value):
                among[name] = other
                reaches[place] |= outcome(case) != usual
            among[name] = value
    left = {place for place, moved in reaches.items() if not moved}
    assert left == {*WITHOUT_EFFECT}
