"""What each estimator estimates, by full enumeration of a policy that is small enough to know.

A toy policy writes T steps of three tokens from a table of scores: logits[t, token so far, next token]. All 3^T
responses are enumerated, so that expectations are sums and nothing is sampled. J = E[R] is the exact objective and its
gradient is found by differentiating the sum. An estimator is unbiased if the expected gradient of its loss, over every
batch that could be drawn, is -grad J. Those that are not have their bias stated here, with its sign: along grad J
(`along` > 1 overshoots, < 1 falls short, < 0 points away) and away from it (`across`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tandem.algos import advantages, returns
from tandem.algos.aggregation import Aggregation, aggregate, loss_weights
from tandem.algos.functions import loss_function
from tandem.algos.kl import KLEstimator, KLGradient, kl_divergence
from tandem.algos.terms import LossInputs

V = 3
EXACT = {"rtol": 0, "atol": 1e-6}  # advantages are float32


@dataclass(frozen=True)
class Toy:
    """steps: T. scores: [T, V, V], the policy's parameters."""

    steps: int
    scores: Tensor

    @classmethod
    def seeded(cls, steps: int, seed: int) -> Toy:
        return cls(steps, torch.randn(steps, V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))

    @property
    def responses(self) -> Tensor:
        """[V^T, T], each response once."""
        return torch.tensor(list(itertools.product(range(V), repeat=self.steps)))

    def logprobs(self, scores: Tensor) -> Tensor:
        """[V^T, T]: of each token of each response."""
        before = torch.cat([torch.zeros_like(self.responses[:, :1]), self.responses[:, :-1]], 1)
        table = torch.log_softmax(scores, -1)
        return table[torch.arange(self.steps), before, self.responses]

    def probabilities(self, scores: Tensor) -> Tensor:
        """[V^T]."""
        return self.logprobs(scores).sum(1).exp()

    def gradient(self, objective: Callable[[Tensor], Tensor]) -> Tensor:
        """Of a function of the scores, [T V V]."""
        scores = self.scores.clone().requires_grad_()
        (found,) = torch.autograd.grad(objective(scores), scores)
        return found.flatten()

    def batches(self, num: int) -> Iterator[tuple[float, list[int]]]:
        """Every batch of `num` responses, with its probability."""
        chances = self.probabilities(self.scores).tolist()
        for chosen in itertools.product(range(len(chances)), repeat=num):
            yield float(torch.tensor([chances[i] for i in chosen], dtype=torch.float64).prod()), list(chosen)


TOY = Toy.seeded(steps=2, seed=0)
REWARDS = torch.tensor([1.0, 0, 0.5, 0, 1, 0, 0.25, 0, 1])
"""Of the nine responses of two steps."""
LONGER = Toy.seeded(steps=3, seed=1)

Advantage = Callable[[Tensor], Tensor]


def exact(toy: Toy, rewards: Tensor) -> Tensor:
    """The gradient of J, [T V V]."""
    return toy.gradient(lambda scores: (toy.probabilities(scores) * rewards).sum())


def expected(
    toy: Toy,
    rewards: Tensor,
    loss: str,
    advantage: Callable[[Tensor], Tensor],
    group: int,
    aggregation: Aggregation = "seq-mean-token-sum",
    length_constant: float | None = None,
) -> Tensor:
    """Minus the expected gradient of a loss over all batches of `group` responses, at ratio 1: what the step estimates."""
    batches = list(toy.batches(group))
    one_lengths, one_mask = torch.full((group,), toy.steps), torch.ones(group * toy.steps, dtype=torch.bool)
    weights = loss_weights(one_mask, one_lengths, aggregation=aggregation, length_constant=length_constant).double()
    chances = torch.tensor([chance for chance, _ in batches], dtype=torch.float64)
    rows = torch.tensor([row for _, chosen in batches for row in chosen])
    # All batches at once: the loss is one of tokens or rows, and each batch weighs what it is likely.
    lengths, mask = one_lengths.repeat(len(batches)), one_mask.repeat(len(batches))
    credit = torch.cat([advantage(rewards[chosen]) for _, chosen in batches])
    old = toy.logprobs(toy.scores)
    columns = {"old_logprobs": old[rows].flatten(), "advantages": advantages.spread(credit, mask, lengths)}

    def objective(scores: Tensor) -> Tensor:
        inputs = LossInputs(toy.logprobs(scores)[rows].flatten(), mask, lengths, columns)
        return -aggregate(loss_function(loss)(inputs).loss, (chances[:, None] * weights).flatten(), mask)

    return toy.gradient(objective)


def along(estimate: Tensor, truth: Tensor) -> float:
    """How much of the true gradient the estimate has: 1 is all of it."""
    return float(estimate @ truth / (truth @ truth))


def across(estimate: Tensor, truth: Tensor) -> float:
    """The length of what points elsewhere, over that of the true gradient."""
    return float((estimate - along(estimate, truth) * truth).norm() / truth.norm())


def group_of(rewards: Tensor) -> Tensor:
    return torch.zeros(len(rewards), dtype=torch.int64)


def grpo(scale: str, leave_one_out: bool = False) -> Advantage:
    return lambda rewards: advantages.group_baseline(
        rewards,
        group_of(rewards),
        scale=scale,
        leave_one_out=leave_one_out,  # type: ignore[arg-type]
    )


def remax(rewards: Tensor) -> Tensor:
    """The baseline is the reward of the greedy response, which does not depend on what was sampled."""
    greedy = REWARDS[TOY.probabilities(TOY.scores).argmax()]
    lengths, mask = torch.full((len(rewards),), 1), torch.ones(len(rewards), dtype=torch.bool)
    return returns.greedy_baseline(rewards, greedy.expand(len(rewards)), mask, lengths).advantages


# ---------------------------------------------------------------------------------------------------- unbiased


UNBIASED: dict[str, tuple[str, Advantage, int]] = {
    "REINFORCE": ("reinforce", advantages.no_baseline, 1),
    "REINFORCE, batches of two": ("reinforce", advantages.no_baseline, 2),
    "ReMax": ("reinforce", remax, 1),
    "RLOO, groups of two": ("ppo_clip", grpo("none", leave_one_out=True), 2),
    "RLOO, groups of three": ("ppo_clip", grpo("none", leave_one_out=True), 3),
    "PPO at ratio 1": ("ppo_clip", advantages.no_baseline, 1),
    "CISPO at ratio 1": ("cispo", advantages.no_baseline, 1),
    "SAPO at ratio 1": ("sapo", advantages.no_baseline, 1),
    "DRO at ratio 1": ("mirror_descent", advantages.no_baseline, 1),
    "DPPO at ratio 1, TV": ("dppo_tv", advantages.no_baseline, 1),
    "DPPO at ratio 1, KL": ("dppo_kl", advantages.no_baseline, 1),
    "importance sampling": ("importance_weighted", advantages.no_baseline, 1),
    "truncated REINFORCE at ratio 1": ("truncated_reinforce", advantages.no_baseline, 1),
    "VESPO at ratio 1": ("variational_reinforce", advantages.no_baseline, 1),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_estimators_have_the_exact_gradient(name: str) -> None:
    loss, advantage, group = UNBIASED[name]
    torch.testing.assert_close(expected(TOY, REWARDS, loss, advantage, group), exact(TOY, REWARDS), **EXACT)


@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip"])
def test_three_steps_are_no_different(loss: str) -> None:
    rewards = torch.linspace(0, 1, V**3)[torch.randperm(V**3, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(expected(LONGER, rewards, loss, advantages.no_baseline, 1), exact(LONGER, rewards), **EXACT)


def test_dividing_by_a_constant_length_only_scales() -> None:
    """Dr. GRPO's length constant: the exact gradient over C."""
    found = expected(TOY, REWARDS, "ppo_clip", advantages.no_baseline, 1, "seq-mean-token-sum-norm", length_constant=7)
    torch.testing.assert_close(7 * found, exact(TOY, REWARDS), **EXACT)


def test_returns_to_go_are_unbiased_with_token_rewards() -> None:
    """Each token is credited with what comes after it; rewards that came before are noise without bias."""
    first = torch.tensor([0.5, 0, 1])[TOY.responses[:, 0]]
    token_rewards = torch.stack([first, REWARDS], 1)
    lengths, mask = torch.full((len(REWARDS),), 2), torch.ones(2 * len(REWARDS), dtype=torch.bool)
    credit = returns.discounted_returns(token_rewards.flatten(), mask, lengths).advantages.view(-1, 2)
    chances = TOY.probabilities(TOY.scores)
    estimate = TOY.gradient(lambda scores: (chances[:, None] * credit * TOY.logprobs(scores)).sum())
    torch.testing.assert_close(estimate, exact(TOY, token_rewards.sum(1)), **EXACT)


def test_a_critic_that_is_exact_leaves_gae_unbiased_for_every_lambda() -> None:
    chances = TOY.probabilities(TOY.scores)
    values = torch.stack([(chances * REWARDS).sum().expand(len(REWARDS)), _value_after_first_token(chances)], 1)
    lengths, mask = torch.full((len(REWARDS),), 2), torch.ones(2 * len(REWARDS), dtype=torch.bool)
    rewards_N = returns.token_rewards(REWARDS.double(), mask, lengths)
    for lam in (0.0, 0.5, 1.0):
        credit = returns.gae(rewards_N, values.flatten(), mask, lengths, lam=lam).advantages.view(-1, 2)
        estimate = TOY.gradient(lambda scores, credit=credit: (chances[:, None] * credit * TOY.logprobs(scores)).sum())
        torch.testing.assert_close(estimate, exact(TOY, REWARDS), **EXACT)


def test_a_critic_that_is_wrong_biases_gae_unless_lambda_is_one() -> None:
    """A constant critic that is too high after the first token credits that token with hope: away from the gradient."""
    chances = TOY.probabilities(TOY.scores)
    hope = torch.tensor([0.0, 2.0, 0.0])[TOY.responses[:, 0]].double()
    values = torch.stack([torch.zeros_like(hope), hope], 1)
    lengths, mask = torch.full((len(REWARDS),), 2), torch.ones(2 * len(REWARDS), dtype=torch.bool)
    rewards_N, truth = returns.token_rewards(REWARDS.double(), mask, lengths), exact(TOY, REWARDS)
    strays = []
    for lam in (1.0, 0.5, 0.0):
        credit = returns.gae(rewards_N, values.flatten(), mask, lengths, lam=lam).advantages.view(-1, 2)
        estimate = TOY.gradient(lambda scores, credit=credit: (chances[:, None] * credit * TOY.logprobs(scores)).sum())
        strays.append(float((estimate - truth).norm() / truth.norm()))
    assert strays[0] < 1e-6 < strays[1] < strays[2]


def _value_after_first_token(chances: Tensor) -> Tensor:
    """[9]: the expected reward given the first token of each response."""
    same = TOY.responses[:, :1] == TOY.responses[:, 0]
    return (same * chances * REWARDS).sum(1) / (same * chances).sum(1)


# ------------------------------------------------------------------------------------------------------ biased


@pytest.mark.parametrize("group", [2, 3])
def test_a_mean_that_includes_the_response_shrinks_the_gradient(group: int) -> None:
    """GRPO without std: the baseline contains the response's own reward, so the gradient is (n - 1) / n of the true one."""
    found = expected(TOY, REWARDS, "ppo_clip", grpo("none"), group)
    torch.testing.assert_close(found * group / (group - 1), exact(TOY, REWARDS), **EXACT)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean"])
def test_dividing_by_the_length_scales_responses_of_equal_length(aggregation: Aggregation) -> None:
    """With equal lengths it is a factor 1 / n and no bias; with lengths that differ it weighs short responses more (below)."""
    found = expected(TOY, REWARDS, "ppo_clip", advantages.no_baseline, 1, aggregation)
    torch.testing.assert_close(TOY.steps * found, exact(TOY, REWARDS), **EXACT)


def test_dividing_by_the_own_length_favours_short_responses() -> None:
    """Token 0 ends a response. Of two equally good ways to be right, the mean over tokens pushes the short one harder."""
    ends_at_once = TOY.responses[:, 0] == 0
    rewards = (ends_at_once | (TOY.responses[:, 1] == 0)).double()
    chances = TOY.probabilities(TOY.scores)
    mask = torch.stack([torch.ones_like(ends_at_once), ~ends_at_once], 1)
    truth = TOY.gradient(lambda scores: (chances * rewards * (TOY.logprobs(scores) * mask).sum(1)).sum())
    by_length = TOY.gradient(lambda scores: (chances * rewards * (TOY.logprobs(scores) * mask).sum(1) / mask.sum(1)).sum())
    short = torch.zeros(2, V, V, dtype=torch.float64)
    short[0, 0, 0] = 1  # the score of ending at once
    assert float(by_length @ short.flatten()) / float(truth @ short.flatten()) > along(by_length, truth)
    assert across(by_length, truth) > 0.05


@pytest.mark.parametrize("group", [2, 3])
def test_dividing_by_the_deviation_changes_the_direction(group: int) -> None:
    """GRPO with std: groups that differ little are weighed up, so the step is not along the gradient of J.

    Its length has little to do with J's: in groups of two every difference is worth 0.71, in groups of three it overshoots.
    """
    found, truth = expected(TOY, REWARDS, "ppo_clip", grpo("group"), group), exact(TOY, REWARDS)
    assert (along(found, truth) > 1) == (group == 3)
    assert across(found, truth) > 0.01


def test_one_deviation_for_all_would_only_scale() -> None:
    """With rewards of 0 and 1 and groups of two, every group that learns has one deviation: no change of direction."""
    binary = (REWARDS > 0.3).float()
    found, truth = expected(TOY, binary, "ppo_clip", grpo("group"), 2), exact(TOY, binary)
    assert along(found, truth) == pytest.approx(2**-0.5, abs=1e-5)
    assert across(found, truth) < 1e-5


BIASED: dict[str, tuple[Advantage, tuple[float, float], bool]] = {
    # advantage of a group of three; bounds of the part along grad J; whether it strays across
    "batch mean (FlashREINFORCE)": (advantages.batch_baseline, (0.66, 0.67), False),  # (n - 1) / n of a batch of n
    "GPG": (lambda rewards: advantages.nonzero_scaled_baseline(rewards, group_of(rewards)), (0.67, 2.0), True),
    "OPO, equal lengths": (
        lambda rewards: advantages.length_weighted_baseline(rewards, group_of(rewards), torch.full((len(rewards),), 2)),
        (0.66, 0.67),
        False,
    ),
    "MaxRL": (lambda rewards: advantages.mean_normalized(rewards, group_of(rewards)), (1.0, 3.0), True),
    "SPPO's centring": (advantages.soft_mean_centred, (0.0, 1.0), True),
    "pass@k": (lambda rewards: advantages.best_of_group(rewards, group_of(rewards), scale="none"), (0.0, 1.0), True),
}


@pytest.mark.parametrize("name", BIASED)
def test_biased_estimators_have_the_bias_that_is_stated(name: str) -> None:
    advantage, (low, high), strays = BIASED[name]
    found, truth = expected(TOY, REWARDS, "ppo_clip", advantage, 3), exact(TOY, REWARDS)
    assert low < along(found, truth) < high
    assert (across(found, truth) > 1e-4) == strays


def test_pass_at_k_is_the_gradient_of_the_groups_best() -> None:
    """Biased for E[R], it is unbiased for E[max R] of the group, over the group's size: pass@k with k = n."""
    group = 2
    found = expected(TOY, REWARDS, "ppo_clip", lambda r: advantages.best_of_group(r, group_of(r), scale="none"), group)

    def best(scores: Tensor) -> Tensor:
        chances = TOY.probabilities(scores)
        return (chances[:, None] * chances * torch.maximum(REWARDS[:, None], REWARDS)).sum()

    torch.testing.assert_close(group * found, TOY.gradient(best), **EXACT)


def test_gspo_at_ratio_one_is_the_gradient_over_the_length() -> None:
    for loss in ("sequence_clip", "geometric_mean"):
        found = expected(TOY, REWARDS, loss, advantages.no_baseline, 1, "seq-mean-token-mean")
        torch.testing.assert_close(TOY.steps * found, exact(TOY, REWARDS), **EXACT)


def test_sppo_at_ratio_one_is_twice_the_gradient() -> None:
    """(s - eta c)^2 at s = 0 has the gradient -2 eta c grad log pi; with c = R, a baseline that is zero."""
    found = expected(TOY, REWARDS, "squared_preference", advantages.no_baseline, 1, "seq-mean-token-mean")
    torch.testing.assert_close(found / 2, exact(TOY, REWARDS), **EXACT)


# ---------------------------------------------------------------------------------------------------------- KL

REFERENCE = Toy.seeded(steps=2, seed=5).scores


def _exact_kl(scores: Tensor) -> Tensor:
    """KL(policy, reference) of whole responses."""
    gap = (TOY.logprobs(scores) - TOY.logprobs(REFERENCE)).sum(1)
    return (TOY.probabilities(scores) * gap).sum()


def _kl(estimator: KLEstimator, gradient: KLGradient = "direct") -> tuple[float, Tensor]:
    """The expected value of an estimator at the sampled responses, and its expected gradient, on policy."""
    chances, old, ref = TOY.probabilities(TOY.scores), TOY.logprobs(TOY.scores), TOY.logprobs(REFERENCE)

    def objective(scores: Tensor) -> Tensor:
        kl = kl_divergence(TOY.logprobs(scores), ref, estimator=estimator, gradient=gradient, old_logprobs_N=old)
        return (chances[:, None] * kl).sum()

    return float(objective(TOY.scores)), TOY.gradient(objective)


def _tokenwise_kl(scores: Tensor) -> Tensor:
    """The sum of each step's exact KL, at the prefixes that the policy of TOY.scores writes: those are held fixed."""
    policy, ref = torch.log_softmax(scores, -1), torch.log_softmax(REFERENCE, -1)
    of_prefix = (policy.exp() * (policy - ref)).sum(-1)
    before = torch.cat([torch.zeros_like(TOY.responses[:, :1]), TOY.responses[:, :-1]], 1)
    return (TOY.probabilities(TOY.scores)[:, None] * of_prefix[torch.arange(2), before]).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_value_of_the_kl(estimator: KLEstimator) -> None:
    assert _kl(estimator)[0] == pytest.approx(float(_exact_kl(TOY.scores)))


def test_k2_and_abs_are_biased_upwards_in_value() -> None:
    """Abs by Jensen; k2 where policy and reference are far apart, as here (close to each other it is nearly exact)."""
    truth = float(_exact_kl(TOY.scores))
    assert _kl("abs")[0] > truth
    assert _kl("k2")[0] > truth


CORRECT_GRADIENT: list[tuple[KLEstimator, KLGradient]] = [
    ("k2", "direct"),
    *((estimator, "straight_through") for estimator in ("k1", "abs", "k2", "k3")),
    *((estimator, "unbiased") for estimator in ("k1", "abs", "k2", "k3")),
    ("k1", "weighted"),
    ("k3", "weighted"),
]


@pytest.mark.parametrize(("estimator", "gradient"), CORRECT_GRADIENT)
def test_gradients_that_are_the_kls(estimator: KLEstimator, gradient: KLGradient) -> None:
    """Of each token's own KL at the prefixes that were sampled. What the token changes later is left to the reward."""
    torch.testing.assert_close(_kl(estimator, gradient)[1], TOY.gradient(_tokenwise_kl), rtol=0, atol=1e-9)


def test_plain_k1_has_no_gradient_at_all() -> None:
    """E[grad log pi] = 0: the reason that the loss refuses it."""
    assert float(_kl("k1")[1].abs().max()) < 1e-12


def test_the_gradient_of_k3_is_that_of_the_other_kl() -> None:
    """E[grad k3] = E[(1 - ref / policy) grad log pi] is the gradient of KL(reference, policy): it vanishes at the same place,
    and far from it, it pulls differently.
    """

    def backwards(scores: Tensor) -> Tensor:
        policy, ref = torch.log_softmax(scores, -1), torch.log_softmax(REFERENCE, -1)
        of_prefix = (ref.exp() * (ref - policy)).sum(-1)
        before = torch.cat([torch.zeros_like(TOY.responses[:, :1]), TOY.responses[:, :-1]], 1)
        return (TOY.probabilities(TOY.scores)[:, None] * of_prefix[torch.arange(2), before]).sum()

    found, truth = _kl("k3")[1], TOY.gradient(_tokenwise_kl)
    torch.testing.assert_close(found, TOY.gradient(backwards), rtol=0, atol=1e-9)
    assert along(found, truth) > 0
    assert across(found, truth) > 0.1


def test_the_gradient_of_abs_is_a_sign_only() -> None:
    """It points towards the reference, by a step that does not depend on the distance."""
    found, truth = _kl("abs")[1], TOY.gradient(_tokenwise_kl)
    assert along(found, truth) > 0
    assert across(found, truth) > 0.1
