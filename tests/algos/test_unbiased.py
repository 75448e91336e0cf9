"""What each estimator estimates: its expected step, by full enumeration of a toy policy, against the exact gradient.

A row of the table is unbiased if the expected gradient of its loss, over every batch that could be drawn, is that of its
objective; a known factor is no bias. Where it is biased, ROWS names each cause with the parameters that take it out:
without all of them the step is exact, and each by itself moves the step the way that CAUSES says. On policy all losses
of tokens have one gradient; OFF_POLICY and CORRECTIONS say what becomes of them when the sampler is another policy. The
last part is about estimators of the KL, in the loss and in the reward.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tandem.algos.aggregation import AGGREGATIONS, Aggregation
from tandem.algos.functions import CORRECTIONS, LOSSES
from tandem.algos.kl import KLEstimator, KLGradient, check_kl_in_loss, kl_divergence
from tandem.types import Algorithm
from tests.algos.pipeline import POLICY, Rows, algorithm
from tests.algos.toy import Toy, V, along, scores_of

TOY, LONGER = Toy(scores_of(steps=2, seed=0)), Toy(scores_of(steps=3, seed=1))
GROUP = 2
EXACT = {"rtol": 0, "atol": 1e-6}  # advantages are float32
VISIBLE = 0.02
"""The least bias that a test takes for one, relative to the step."""

# The seven responses are 0, 1 0, 1 1, 1 2, 2 0, 2 1 and 2 2; to end at once is as good as the best long answer.
REWARDS = torch.tensor([1.0, 0, 1, 0, 0.5, 0, 0.75], dtype=torch.float64)
CHANCES = TOY.chances(TOY.scores)
TABLE = TOY.scores.log_softmax(-1)
TEACHER = scores_of(steps=2, seed=5)
GIVEN_FIRST = torch.stack([REWARDS[0], TABLE[1, 1].exp() @ REWARDS[1:4], TABLE[1, 2].exp() @ REWARDS[4:7]])
"""The reward to expect after each first token."""
CRITIC = torch.stack([(TABLE[0, 0].exp() @ GIVEN_FIRST).expand(V, V), GIVEN_FIRST[:, None].expand(V, V)])
"""A critic that knows what to expect before each token."""
HOPEFUL = CRITIC + 0.5 * (torch.arange(V) == 2)[:, None] * torch.tensor([0.0, 1.0])[:, None, None]
"""One that believes in responses that begin with token 2, more than they deserve."""

PROCESS = TOY.of_tokens(torch.tensor([0.2, 0.5, -0.3], dtype=torch.float64).expand(2, V, V))
"""What a process model pays for each token, with its beta of 0.05."""

OF_TOY: Rows = {
    "rewards": REWARDS,
    "reward_baselines": REWARDS[CHANCES.argmax()].expand(len(REWARDS)),
    "reward_components": torch.stack([REWARDS.clamp(max=0.5), (REWARDS - 0.5).clamp(min=0)], 1),
    "values": TOY.of_tokens(HOPEFUL),
    "prm_logprobs": TOY.logprobs(TEACHER) + PROCESS / 0.05,
    "teacher_logprobs": TOY.logprobs(TEACHER),
    "ref_logprobs": TOY.logprobs(TEACHER),
    "sum_pi_squared": TOY.of_tokens(TABLE.exp().square().sum(-1, keepdim=True).expand_as(TABLE)),
    "turns": torch.zeros(int(TOY.lengths.sum()), dtype=torch.int64),
    "uniforms": torch.linspace(0, 1, int(TOY.lengths.sum()), dtype=torch.float64),
}


def kl_of_tokens(toy: Toy, scores: Tensor) -> Tensor:
    """The sum of each token's own KL(policy, teacher), at the prefixes that the sampler writes: those are held fixed."""
    policy, teacher = scores.log_softmax(-1), TEACHER.log_softmax(-1)
    each = toy.of_tokens((policy.exp() * (policy - teacher)).sum(-1, keepdim=True).expand_as(scores))
    return toy.chances(toy.scores if toy.sampler is None else toy.sampler) @ toy.sum(each)


def of_pairs(values: Tensor) -> Tensor:
    """[S]: the gradient of the expectation of `values` [R, R], one a pair of responses."""
    return TOY.gradient(lambda scores: TOY.chances(scores) @ values @ TOY.chances(scores))


WAYS: dict[str, Tensor] = {
    # what an algorithm maximises
    "reward": TOY.mean(REWARDS),
    "best of two": of_pairs(torch.maximum(REWARDS[:, None], REWARDS)),
    "like the teacher": TOY.gradient(lambda scores: -kl_of_tokens(TOY, scores)),
    # where a bias leads
    "short": -TOY.mean(TOY.lengths.double()),
    "better than another": TOY.mean(torch.sign(REWARDS[:, None] - REWARDS) @ CHANCES),
    "better by any margin": TOY.mean((REWARDS[:, None] > REWARDS).double() @ CHANCES),
    "rewarded": TOY.mean((REWARDS > 0).double()),
    "hoped for": TOY.mean(torch.tensor([float(response[0] == 2) for response in TOY.responses], dtype=torch.float64)),
    "by its process": TOY.mean(TOY.sum(PROCESS)),
    "various": TOY.gradient(lambda scores: -(TOY.chances(scores) * TOY.chances(scores).log()).sum()),
}
"""[S]: the gradient of an expectation over responses, by what it makes them."""


# ---------------------------------------------------------------------------------------------------- on policy


@dataclass(frozen=True)
class Cause:
    """way: where it moves the step: "less" or "more" of the exact gradient, or one of WAYS. adds: as it stands, not just
    beside some factor of the exact step.
    """

    why: str
    way: str
    adds: bool = False


CAUSES: dict[str, Cause] = {
    "deviation": Cause("divided by it, a small difference counts as much as a large one", "better than another"),
    "deviation of the best": Cause("divided by it, the best counts the same by any margin", "better by any margin"),
    "whitening": Cause(
        "its deviation is that of the batch at hand, and a batch of small differences counts more", "better than another"
    ),
    "length": Cause("a mean over tokens: of two responses that are equally good the short one is pushed harder", "short"),
    "own return": Cause("the baseline contains the response's own return, by a weight that the response decides", "less"),
    "own reward": Cause("the soft mean contains the response's own reward", "less"),
    "successes": Cause("a batch in which fewer are rewarded counts more", "more"),
    "own mean": Cause("a group that is rewarded less counts more", "more"),
    "dropped": Cause("tokens whose advantage and logprob are both high do not learn", "various", adds=True),
    "critic": Cause("below lambda 1 the critic's belief stands for what comes", "hoped for", adds=True),
    "imitation": Cause("what was rewarded is imitated, whether or not it was better than expected", "rewarded", adds=True),
    "process": Cause("the sum of process rewards is another objective", "by its process", adds=True),
    "resampling": Cause("responses with rewards near 0 are seldom drawn, and hardly pushed away", "less"),
    "teacher": Cause("closeness to a teacher is another objective", "like the teacher", adds=True),
}

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """factor: how much of its objective's gradient the step is, once every cause is out.

    causes: each with the parameters that take it out (and `advantage`, another estimator), or None where it is what the
    algorithm is about. objective: one of WAYS. params: where the defaults would show nothing on a toy.
    """

    factor: float = 1.0
    causes: Mapping[str, Params | None] = field(default_factory=dict[str, Params | None])
    objective: str = "reward"
    params: Params = field(default_factory=dict[str, Any])


OWN = (GROUP - 1) / GROUP
"""The mean of a group of n contains the response's own reward, which takes 1 / n of the gradient away."""
SUM: Params = {"aggregation": "seq-mean-token-sum", "length_constant": None}
PLAIN: Params = {"scale": "none"}
GRPO = Row(OWN, {"deviation": PLAIN, "length": SUM})
CENTRED = Row(OWN, {"length": SUM})

ROWS: dict[str, Row] = {
    # unbiased as they are
    "reinforce": Row(),
    "remax": Row(),
    "rloo": Row(),
    "dr_grpo": Row(OWN / 8),  # 8 is its length constant
    "importance_sampling": Row(OWN * GROUP),  # a sum over the batch, no mean
    # unbiased but for the mean over tokens
    **dict.fromkeys(("flash_reinforce", "prime_rl", "topr", "dro", "reinforce_tis"), CENTRED),
    **dict.fromkeys(("opd", "prime_rl_opd"), Row(1, {"length": SUM}, "like the teacher")),
    # divided by a deviation
    **dict.fromkeys(("grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "kl_cov"), GRPO),
    "luspo": Row(OWN, {"deviation": PLAIN}),
    "clip_cov": Row(OWN, {**GRPO.causes, "dropped": {"cov_low": 8.0, "cov_high": 9.0}}, params={"cov_low": 0.01, "cov_frac": 0.5}),
    "passk": Row(1 / GROUP, {"deviation of the best": PLAIN, "length": SUM}, "best of two"),
    "reinforce_pp": Row(1, {"whitening": {"advantage": "discounted_returns"}, "length": SUM}),
    "reinforce_pp_baseline": Row(OWN, {"whitening": {"advantage": "group_baseline"}, "length": SUM}),
    "gdpo": Row(OWN, {"deviation": None, "whitening": {"advantage": "decoupled_normalization"}, "length": SUM}),
    # baselines and scales that contain the response
    "opo": Row(1, {"own return": None, "length": SUM}),
    "otb": Row(1, {"own return": None, "length": SUM}),
    "gpg": Row(OWN, {"successes": None, "length": SUM}),
    "maxrl": Row(OWN, {"own mean": None, "length": SUM}),
    "sppo": Row(2, {"own reward": {"advantage": "no_baseline"}}),  # 2 is the derivative of its square
    # with a second model
    "ppo": Row(1, {"whitening": {"advantage": "gae"}, "length": SUM}),
    "turn_ppo": Row(1, {"whitening": {"advantage": "turn_gae"}, "length": SUM}),
    "pf_ppo": Row(1, {"resampling": {"resampling": None}, "whitening": {"advantage": "gae"}, "length": SUM}),
    "vapo": Row(1, {"critic": {"lam_policy": 1.0}, "imitation": {"positive_nll_weight": 0.0}, "length": SUM}),
    "prime": Row(5, {"process": {"process_coef": 0.0}, "whitening": {"advantage": "process_and_outcome"}, "length": SUM}),
    **dict.fromkeys(("mopd", "grpo_opd"), Row(OWN, {"teacher": {"distillation_coef": 0.0}, **GRPO.causes})),
}
CURABLE = {name: {cause: params for cause, params in row.causes.items() if params is not None} for name, row in ROWS.items()}


def test_every_row_has_its_claim() -> None:
    assert ROWS.keys() == set(POLICY)
    assert CAUSES.keys() == {cause for row in ROWS.values() for cause in row.causes}


def chosen(name: str, *changes: Params) -> Algorithm:
    """The row with these changes, `advantage` among them."""
    params = {key: value for change in changes for key, value in change.items()}
    advantage = params.pop("advantage", None)
    found = algorithm(name, **params)
    return found if advantage is None else replace(found, advantage=advantage)


def step(name: str, *changes: Params, group: int = GROUP, **columns: Tensor) -> Tensor:
    """[S]: the expected step of a row on the toy."""
    return TOY.expected_step(chosen(name, *changes), {**OF_TOY, **columns}, group)


def beside(estimate: Tensor, exact: Tensor) -> Tensor:
    """The part of an estimate that no factor of the exact step explains."""
    return estimate - along(estimate, exact) * exact


def angle(estimate: Tensor, exact: Tensor) -> float:
    """Its tangent: the length of what no factor explains, over that of the rest."""
    return float(beside(estimate, exact).norm() / (along(estimate, exact) * exact).norm())


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / one.norm() / other.norm())


@pytest.mark.parametrize("name", ROWS)
def test_without_its_causes_a_row_is_exact_and_with_them_it_is_not(name: str) -> None:
    row, cures = ROWS[name], CURABLE[name]
    exact = row.factor * WAYS[row.objective]
    if cures.keys() == row.causes.keys():
        torch.testing.assert_close(step(name, row.params, *cures.values()), exact, rtol=0, atol=1e-6 * row.factor)
    if row.causes:
        assert float((step(name, row.params) - exact).norm() / exact.norm()) > VISIBLE


@pytest.mark.parametrize(("name", "cause"), [(name, cause) for name, row in ROWS.items() for cause in row.causes])
def test_each_cause_moves_the_step_as_it_says(name: str, cause: str) -> None:
    row, cures, claim = ROWS[name], CURABLE[name], CAUSES[cause]
    exact = step(name, row.params, *cures.values()) if cause in cures else row.factor * WAYS[row.objective]
    biased = step(name, row.params, *(params for each, params in cures.items() if each != cause))
    factor = along(biased, exact)
    if claim.way in ("less", "more"):
        assert 0 < factor < 1 - VISIBLE if claim.way == "less" else factor > 1 + VISIBLE, claim.why
        assert angle(biased, exact) > VISIBLE, "no factor repairs it"
        return
    way = WAYS[claim.way]
    bias, way = (biased - exact, way) if claim.adds else (beside(biased, exact), beside(way, exact))
    assert float(bias.norm() / (factor * exact).norm()) > VISIBLE
    assert cosine(bias, way) > 0.9, claim.why


@pytest.mark.parametrize(("name", "factor"), [("rloo", 1.0), ("flash_reinforce", 2 / 3), ("dr_grpo", 2 / 24)])
def test_in_groups_of_three_the_factor_is_what_the_group_says(name: str, factor: float) -> None:
    changes = SUM if name == "flash_reinforce" else {}
    torch.testing.assert_close(step(name, changes, group=3), factor * WAYS["reward"], **EXACT)


@pytest.mark.parametrize(("name", "group"), [("reinforce", 1), ("remax", 1), ("rloo", 2)])
def test_three_steps_are_no_different(name: str, group: int) -> None:
    num = len(LONGER.responses)
    rewards = torch.linspace(0, 1, num, dtype=torch.float64)[torch.randperm(num, generator=torch.Generator().manual_seed(0))]
    columns = {"rewards": rewards, "reward_baselines": rewards[3].expand(num)}
    torch.testing.assert_close(LONGER.expected_step(algorithm(name), columns, group), LONGER.mean(rewards), **EXACT)


def test_grpo_in_pairs_climbs_the_chance_to_be_better_than_another() -> None:
    """Two rewards that differ have advantages of 2^-0.5 and its negative, however much they differ."""
    torch.testing.assert_close(step("grpo", SUM), 2**-0.5 * WAYS["better than another"], rtol=0, atol=1e-5)


def test_pass_at_k_in_pairs_with_a_deviation_forgets_by_how_much_the_best_is_best() -> None:
    """Of two rewards that differ the higher one earns 2^0.5."""
    torch.testing.assert_close(step("passk", SUM), 2**0.5 * WAYS["better by any margin"], rtol=0, atol=1e-5)


def test_maxrl_in_groups_of_three_climbs_two_terms_of_the_logarithm() -> None:
    """With rewards of 0 and 1: of log p = -(q + q^2 / 2 + q^3 / 3 + ...), q = 1 - p, groups of n have n - 1 terms."""
    right = (REWARDS > 0.6).double()

    def two_terms(scores: Tensor) -> Tensor:
        fails = 1 - TOY.chances(scores) @ right
        return -(fails + fails**2 / 2)

    torch.testing.assert_close(step("maxrl", SUM, group=3, rewards=right), TOY.gradient(two_terms), rtol=0, atol=1e-5)


def test_gpg_scales_by_nothing_where_every_reward_counts() -> None:
    torch.testing.assert_close(step("gpg", SUM, rewards=REWARDS + 1), OWN * WAYS["reward"], **EXACT)


def test_the_mean_of_whitening_takes_a_part_of_the_own_advantage_away() -> None:
    """Half of it in a batch of two, were the responses of one length; a long one has more tokens in the mean."""
    found = step("reinforce_pp", SUM, {"whiten_std": False})
    assert along(found, WAYS["reward"]) == pytest.approx(OWN, abs=0.1)
    assert angle(found, WAYS["reward"]) > VISIBLE


@pytest.mark.parametrize("name", ["opo", "otb"])
def test_the_own_return_weighs_less_in_a_larger_group(name: str) -> None:
    two, three = (along(step(name, SUM, group=group), WAYS["reward"]) for group in (2, 3))
    assert two < three - 0.05 < 0.95


def test_a_critic_that_knows_leaves_every_lambda_unbiased() -> None:
    for lam in (0.0, 0.5, 1.0):
        found = step("ppo", SUM, {"advantage": "gae", "lam": lam}, group=1, values=TOY.of_tokens(CRITIC))
        torch.testing.assert_close(found, WAYS["reward"], **EXACT)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ppo", [{"advantage": "gae", "lam": lam} for lam in (1.0, 0.5, 0.0)]),
        # a response of n tokens has lambda 1 - 1 / (alpha n): a larger alpha trusts the critic less
        ("vapo", [{"positive_nll_weight": 0.0, "length_adaptive_alpha": alpha} for alpha in (1e9, 1.0, 0.05)]),
    ],
)
def test_a_critic_that_hopes_is_believed_the_more_the_smaller_lambda_is(name: str, changes: list[Params]) -> None:
    steps = [step(name, SUM, change, group=1) for change in changes]
    torch.testing.assert_close(steps[0], WAYS["reward"], **EXACT)
    hopes = [float((found - steps[0]) @ WAYS["hoped for"]) for found in steps]
    assert 0 == hopes[0] < hopes[1] < hopes[2]


def test_the_leave_one_out_of_process_rewards_is_biased_where_responses_have_lengths() -> None:
    """A row's baseline counts once a token that is left, so that what a response costs depends on how long it gets."""
    changes = {"advantage": "process_and_outcome", "outcome_coef": 0.0, "process_coef": 1.0}
    assert angle(step("prime", SUM, changes), WAYS["by its process"]) > VISIBLE


AGGREGATION: dict[Aggregation, tuple[float, bool]] = {
    # the factor of the exact gradient for batches of two, or whether it favours short responses
    "seq-mean-token-sum": (1.0, False),
    "seq-mean-token-sum-norm": (1 / 8, False),
    "token-sum": (2.0, False),
    "seq-mean-token-mean": (0.0, True),  # every response weighs the same, and so a token of a short one weighs more
    "token-mean": (0.0, True),  # a batch of short responses has fewer tokens, each of which weighs more
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_aggregation_that_divides_by_lengths_favours_short_responses(mode: Aggregation) -> None:
    factor, favours_short = AGGREGATION[mode]
    constant = 8.0 if mode == "seq-mean-token-sum-norm" else None
    found = step("reinforce", {"aggregation": mode, "length_constant": constant})
    if favours_short:
        assert angle(found, WAYS["reward"]) > VISIBLE
        assert cosine(beside(found, WAYS["reward"]), beside(WAYS["short"], WAYS["reward"])) > 0.9
    else:
        torch.testing.assert_close(found, factor * WAYS["reward"], **EXACT)


# --------------------------------------------------------------------------------------------------- off policy


OFF = Toy(TOY.scores, sampler=TOY.scores + 0.3 * scores_of(steps=2, seed=9))
"""The sampler is another policy than the one that is trained."""


@dataclass(frozen=True)
class OffPolicy:
    """exact: parameters with which the step is the exact gradient, or None where it never is, for the reason in `why`.

    params: where the defaults would show nothing on a toy. columns: what the loss reads, the same for every token.
    """

    why: str
    exact: Params | None = None
    params: Params = field(default_factory=dict[str, Any])
    columns: Mapping[str, float] = field(default_factory=dict[str, float])


TOKEN_RATIO = "each token has its own ratio, and that the tokens before it were drawn by another policy is forgotten"
OFF_POLICY: dict[str, OffPolicy] = {
    "reinforce": OffPolicy("no ratio at all"),
    "mirror_descent": OffPolicy("no ratio, and a pull back to the sampler"),
    "importance_weighted": OffPolicy(TOKEN_RATIO),
    "truncated_reinforce": OffPolicy(f"{TOKEN_RATIO}; above 1 it is cut"),
    "tapered_reinforce": OffPolicy("what was rewarded has no ratio, the rest one of each token, cut above 1"),
    "cispo": OffPolicy(f"{TOKEN_RATIO}; above clip_high it is cut"),
    "ppo_clip": OffPolicy(f"{TOKEN_RATIO}; beyond the clip there is no gradient"),
    "clip_cov": OffPolicy(f"{TOKEN_RATIO}; beyond the clip there is no gradient", columns={"random_covariant": 0}),
    "kl_cov": OffPolicy(f"{TOKEN_RATIO}; chosen tokens are pulled back to the sampler", columns={"most_covariant": 1}),
    "sapo": OffPolicy(f"{TOKEN_RATIO}; far ones have a small gradient"),
    "dppo_tv": OffPolicy(f"{TOKEN_RATIO}; far ones have no gradient"),
    "dppo_kl": OffPolicy(f"{TOKEN_RATIO}; far ones have no gradient"),
    "sequence_clip": OffPolicy(
        "exact with the product of all ratios and no clip; the geometric mean is another number",
        exact={"ratio": "product", "gradient": "sequence", "clip_low": 1.0, "clip_high": 1e9},
    ),
    "geometric_mean": OffPolicy("the geometric mean of the ratios is not their product"),
    "variational_reinforce": OffPolicy("a weight that falls on both sides of 1"),
    "squared_preference": OffPolicy("a regression: it pulls the log-ratio to the reward"),
}
TERMS = {"squared_log_ratio", "positive_nll", "reverse_kl_policy_gradient", "kl", "distillation"}
"""Losses that are added to one of these."""
OF_OTHERS = {
    *("nll", "value", "implicit_reward", "reward_model", "preference", "chosen_nll"),
    *("topk_distillation", "jsd_distillation"),
}
"""Losses without a reward: they imitate a response, a choice or a teacher."""


def off_policy_step(loss: str, params: Params, columns: Rows) -> Tensor:
    """With REINFORCE's advantages, and rewards around 0, so that both signs occur."""
    base = algorithm("reinforce", **SUM)
    made = replace(base, loss=loss, params={**base.params, **params}, needs=base.needs | ({"correction"} & params.keys()))
    return OFF.expected_step(made, {**OF_TOY, "rewards": REWARDS - 0.5, **columns}, 1)


def test_every_loss_has_its_claim() -> None:
    assert OFF_POLICY.keys() == LOSSES.keys() - TERMS - OF_OTHERS


@pytest.mark.parametrize("loss", OFF_POLICY)
def test_off_policy_a_loss_is_exact_only_with_the_ratio_of_the_whole_response(loss: str) -> None:
    claim = OFF_POLICY[loss]
    columns = {name: torch.full_like(OF_TOY["values"], value) for name, value in claim.columns.items()}
    found = off_policy_step(loss, {}, columns)
    assert angle(found, WAYS["reward"]) > VISIBLE, claim.why
    if claim.exact is not None:
        found = off_policy_step(loss, {**claim.exact, "aggregation": "seq-mean-token-mean"}, columns)
        torch.testing.assert_close(found, WAYS["reward"], **EXACT)


@pytest.mark.parametrize(("shift", "same_as"), [(0.1, "reinforce"), (-2.0, "truncated_reinforce")])
def test_topr_has_no_ratio_where_there_is_a_reward_and_a_cut_one_elsewhere(shift: float, same_as: str) -> None:
    columns = {"rewards": REWARDS + shift}
    found, expected = (off_policy_step(loss, {}, columns) for loss in ("tapered_reinforce", same_as))
    torch.testing.assert_close(found, expected)
    assert angle(found, off_policy_step("importance_weighted", {}, columns)) > VISIBLE


CORRECTED: dict[str, OffPolicy] = {
    "token_tis": OffPolicy(f"{TOKEN_RATIO}; above `high` it is cut"),
    "seq_tis": OffPolicy("exact until it is cut", exact={"high": 1e9}, params={"high": 1.2}),
    "icepop": OffPolicy(f"{TOKEN_RATIO}; far tokens are dropped"),
    "kpop": OffPolicy(f"{TOKEN_RATIO}; far tokens are dropped"),
    "token_trust_region": OffPolicy(f"{TOKEN_RATIO}; far tokens are dropped"),
    "m2po": OffPolicy("the farthest tokens are dropped, the rest has no weight"),
    "sequence_mask": OffPolicy(
        "far rows are dropped; exact with the row's own ratio and no bound",
        exact={"ratio": "product", "weight": "row", "high": 1e9},
    ),
    "seq_mask_tis": OffPolicy(f"{TOKEN_RATIO}; far rows are dropped"),
    "sequence_trust_region": OffPolicy(f"{TOKEN_RATIO}; far rows are dropped"),
    "off_policy_sequence_mask": OffPolicy("drops failures that have become unlikely, and has no weight"),
    "rejection_sampling": OffPolicy("what is far is dropped, the rest has no weight"),
}


def test_every_correction_has_its_claim() -> None:
    assert CORRECTED.keys() == CORRECTIONS.keys()


@pytest.mark.parametrize("name", CORRECTED)
def test_a_correction_is_exact_only_with_the_ratio_of_the_whole_response(name: str) -> None:
    """The trainer's policy is `old`, the sampler's another; the loss is REINFORCE, whose gradient is exact on policy."""
    claim, trainer = CORRECTED[name], {"old_logprobs": OFF.logprobs(OFF.scores)}
    found = off_policy_step("reinforce", {"correction": {name: dict(claim.params)}}, trainer)
    assert float((found - WAYS["reward"]).norm() / WAYS["reward"].norm()) > VISIBLE, claim.why
    if claim.exact is not None:
        found = off_policy_step("reinforce", {"correction": {name: dict(claim.exact)}}, trainer)
        torch.testing.assert_close(found, WAYS["reward"], **EXACT)


def test_a_token_ratio_is_exact_for_a_single_token() -> None:
    one = Toy(scores_of(1, 0), sampler=scores_of(1, 4))
    rewards = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    found = one.expected_step(algorithm("importance_sampling", bypass=False, leave_one_out=False), {"rewards": rewards}, 2)
    torch.testing.assert_close(found, one.mean(rewards), **EXACT)


# ---------------------------------------------------------------------------------------------------------- KL


KL_VALUE: dict[KLEstimator, str] = {"k1": "exact", "k3": "exact", "abs": "above", "k2": "above"}
"""abs by Jensen; k2 where policy and teacher are far apart, as here (close to each other it is nearly exact)."""

KL_IN_LOSS: dict[tuple[KLEstimator, KLGradient], tuple[str, str]] = {
    # the expected gradient on policy, and off policy with old_logprobs the sampler's
    ("k1", "direct"): ("nothing", "away"),  # E[grad log pi] = 0, the reason that a loss refuses it; else a push to the sampler
    ("abs", "direct"): ("other", "other"),  # a sign, whatever the distance
    ("k2", "direct"): ("exact", "other"),  # d grad d, which off policy lacks the ratio
    ("k3", "direct"): ("the other way round", "other"),  # (1 - 1 / ratio) grad log pi: that of KL(teacher, policy)
    **{(estimator, "straight_through"): ("exact", "other") for estimator in ("k1", "abs", "k2", "k3")},  # k2's
    **{(estimator, "unbiased"): ("exact", "exact") for estimator in ("k1", "abs", "k2", "k3")},  # ratio d grad log pi
    ("k1", "weighted"): ("exact", "exact"),
    ("k3", "weighted"): ("exact", "exact"),
    ("abs", "weighted"): ("other", "other"),  # the gradient of E|d|, which is another divergence
    ("k2", "weighted"): ("other", "other"),  # the gradient of E[d^2] / 2
}

KL_IN_REWARD: dict[KLEstimator, str] = {
    "k1": "exact",  # and of whole responses: what a token changes later is credited to it
    "abs": "other",
    "k2": "other",
    "k3": "other",  # its value is right, and its own gradient, which a reward has not, is a part of that of its expectation
}


def kl_in_loss(toy: Toy, estimator: KLEstimator, gradient: KLGradient) -> tuple[float, Tensor]:
    """Its expected value, a response, and expected gradient [S]."""
    sampler = toy.scores if toy.sampler is None else toy.sampler
    likely, old, teacher = toy.chances(sampler), toy.logprobs(sampler), toy.logprobs(TEACHER)

    def objective(scores: Tensor) -> Tensor:
        kl = kl_divergence(toy.logprobs(scores), teacher, estimator=estimator, gradient=gradient, old_logprobs_N=old)
        return likely @ toy.sum(kl)

    return float(objective(toy.scores)), toy.gradient(objective)


def kl_the_other_way_round(scores: Tensor) -> Tensor:
    """The sum of each token's own KL(teacher, policy)."""
    policy, teacher = scores.log_softmax(-1), TEACHER.log_softmax(-1)
    each = TOY.of_tokens((teacher.exp() * (teacher - policy)).sum(-1, keepdim=True).expand_as(scores))
    return CHANCES @ TOY.sum(each)


def kl_of_responses(scores: Tensor) -> Tensor:
    return TOY.chances(scores) @ TOY.sum(TOY.logprobs(scores) - TOY.logprobs(TEACHER))


def check_gradient(found: Tensor, claim: str, exact: Tensor) -> None:
    match claim:
        case "exact":
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-9)
        case "nothing":
            assert float(found.abs().max()) < 1e-12
        case "the other way round":
            torch.testing.assert_close(found, TOY.gradient(kl_the_other_way_round), rtol=0, atol=1e-9)
            check_gradient(found, "other", exact)
        case _:
            assert angle(found, exact) > VISIBLE
            assert (along(found, exact) > 0) == (claim == "other"), "towards the teacher, or away from it"


def test_every_estimator_and_gradient_of_the_kl_has_its_claim() -> None:
    assert KL_VALUE.keys() == KL_IN_REWARD.keys() == set(get_args(KLEstimator))
    assert KL_IN_LOSS.keys() == set(itertools.product(get_args(KLEstimator), get_args(KLGradient)))


@pytest.mark.parametrize("estimator", KL_VALUE)
def test_the_value_of_a_kl_estimator(estimator: KLEstimator) -> None:
    found, exact = kl_in_loss(TOY, estimator, "direct")[0], float(kl_of_responses(TOY.scores))
    assert exact > 0
    assert found == pytest.approx(exact) if KL_VALUE[estimator] == "exact" else found > (1 + VISIBLE) * exact


@pytest.mark.parametrize(("estimator", "gradient"), KL_IN_LOSS)
def test_the_gradient_of_a_kl_in_the_loss(estimator: KLEstimator, gradient: KLGradient) -> None:
    """Against each token's own KL at the prefixes that were sampled. What a token changes later is left to the reward."""
    for toy, claim in zip((TOY, OFF), KL_IN_LOSS[estimator, gradient], strict=True):
        found = kl_in_loss(toy, estimator, gradient)[1]
        exact = toy.gradient(lambda scores, toy=toy: kl_of_tokens(toy, scores))
        check_gradient(found, claim, exact)


def test_a_loss_refuses_the_gradients_that_do_not_pull_towards_the_reference() -> None:
    for estimator in ("k1", "abs"):
        with pytest.raises(ValueError, match="does not work inside a loss"):
            check_kl_in_loss(estimator, "direct")


@pytest.mark.parametrize("estimator", KL_IN_REWARD)
def test_the_gradient_of_a_kl_in_the_reward(estimator: KLEstimator) -> None:
    """A penalty that is earned token by token, with REINFORCE's returns; the expected step goes down the KL of responses."""
    changes = {"advantage": "discounted_returns", "reward_kl_coef": 1.0, "reward_kl_estimator": estimator}
    found = -step("reinforce_pp", SUM, changes, group=1, rewards=torch.zeros_like(REWARDS))
    exact = TOY.gradient(kl_of_responses)
    assert along(found, exact) > 0
    if KL_IN_REWARD[estimator] == "exact":
        torch.testing.assert_close(found, exact, **EXACT)
    else:
        assert angle(found, exact) > VISIBLE
