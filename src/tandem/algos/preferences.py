"""Losses on pairs: policies and reward models learn which of two responses is better. One loss a pair; their mean is the loss.

A pair is a group of two rows, told apart by row column `chosen`. Its loss stands on every counted token of both, so that
the mean over rows of token means is the mean over pairs.

Legend: P pairs, B rows, N packed tokens; column 0 is the chosen response and column 1 the rejected one; d_c, d_r their
logprobs less the reference's, summed over the response; h = d_c - d_r; ls = log sigmoid.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from tandem.algos.checks import checked, keep
from tandem.algos.ratios import check, check_choice
from tandem.algos.segments import CountedTokens, Groups, on_tokens, row_counts, row_sum, to_array
from tandem.algos.terms import LossInputs, TokenLoss, masked_mean, whole_groups, whole_rows
from tandem.errors import ColumnError
from tandem.types import Metric, Metrics

Preference = Literal["sigmoid", "robust", "ipo", "hinge", "sppo_hard"]


class PairLoss(NamedTuple):
    """loss: [P], with gradient. rewards: [P, 2], what the policy implicitly (or the model openly) gives to each response."""

    loss: Tensor
    rewards: Tensor

    @property
    def accuracy(self) -> Tensor:
        """The share of pairs whose chosen response has the higher reward."""
        return (self.rewards[:, 0] > self.rewards[:, 1]).double().mean()


@checked
def preference_loss(
    logprobs_P2: Tensor,
    ref_logprobs_P2: Tensor,
    lengths_P2: Tensor | None = None,
    *,
    preference: Preference = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """sigmoid: (1 - e)(-ls(beta h)) + e(-ls(-beta h)), DPO (arXiv 2305.18290), and with e = label_smoothing > 0 cDPO.

    robust: ((1 - e)(-ls(beta h)) - e(-ls(-beta h))) / (1 - 2 e) (arXiv 2403.00409). ipo: (h - 1 / (2 beta))^2 (2310.12036).
    hinge: max(0, 1 - beta h). sppo_hard: (d_c - 1 / (2 beta))^2 + (d_r + 1 / (2 beta))^2 (2405.00675).

    Args:
        logprobs_P2: [P, 2] summed over each response, with gradient.
        ref_logprobs_P2: the reference's.
        lengths_P2: tokens of each response; with them IPO takes means instead of sums (TRL, AReaL). For ipo only.
        beta: how strongly a response is held to the reference; the inverse of a margin.
        label_smoothing: e, the share of labels that are wrong; in [0, 0.5), for sigmoid and robust.
    """
    check_choice("preference", preference, get_args(Preference))
    check(beta > 0, f"beta must be positive, got {beta}")
    check(0 <= label_smoothing < 0.5, f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
    check(not label_smoothing or preference in ("sigmoid", "robust"), f"preference={preference} has no label_smoothing")
    check(lengths_P2 is None or preference == "ipo", f"preference={preference} sums over a response: leave its lengths out")
    gain_P2 = logprobs_P2 - ref_logprobs_P2
    rewards = beta * gain_P2.detach()
    if lengths_P2 is not None:
        gain_P2 = gain_P2 / lengths_P2
    chosen, rejected = gain_P2.unbind(1)
    h, middle = chosen - rejected, 1 / (2 * beta)
    right, wrong = -logsigmoid(beta * h), -logsigmoid(-beta * h)
    match preference:
        case "sigmoid":
            loss = (1 - label_smoothing) * right + label_smoothing * wrong
        case "robust":
            loss = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
        case "ipo":
            loss = (h - middle) ** 2
        case "hinge":
            loss = (1 - beta * h).clamp(min=0)
        case "sppo_hard":
            loss = (chosen - middle) ** 2 + (rejected + middle) ** 2
    return PairLoss(loss, rewards)


@whole_groups
def preference_term(
    inputs: LossInputs,
    *,
    preference: Preference = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    per_token: bool = False,
) -> TokenLoss:
    """With h = (x_c - f_c) - (x_r - f_r), x the policy's and f the reference's logprobs summed over a response, ls = log sigmoid:

    sigmoid: (1 - e)(-ls(beta h)) + e(-ls(-beta h)). robust: ((1 - e)(-ls(beta h)) - e(-ls(-beta h))) / (1 - 2 e).
    ipo: (h - 1 / (2 beta))^2. hinge: max(0, 1 - beta h). sppo_hard: (d_c - 1 / (2 beta))^2 + (d_r + 1 / (2 beta))^2, where
    h = d_c - d_r; e = label_smoothing. Reads ref_logprobs and chosen.

    per_token: means over a response in place of sums, for ipo only (TRL, AReaL).
    """
    pairs_P2 = rows_of_pairs(inputs)
    logprobs_B, ref_B = (
        row_sum(column, inputs.mask, inputs.lengths) for column in (inputs.policy_logprobs, inputs.token("ref_logprobs"))
    )
    lengths_P2 = row_counts(inputs.mask, inputs.lengths)[pairs_P2] if per_token else None
    result = preference_loss(
        logprobs_B[pairs_P2],
        ref_B[pairs_P2],
        lengths_P2,
        preference=preference,
        beta=beta,
        label_smoothing=label_smoothing,
    )
    return _on_rows(inputs, result, pairs_P2)


def chosen_nll(inputs: LossInputs, *, nll_coef: float = 0.0) -> TokenLoss:
    """Adds nll_coef times the mean over pairs of the chosen response's mean -x, term "nll" (RPO, arXiv 2404.19733).

    It keeps the chosen response likely, which a margin alone does not. Reads chosen; nothing where nll_coef is 0.
    """
    check(nll_coef >= 0, f"nll_coef must not be negative, got {nll_coef}")
    if not nll_coef:
        return TokenLoss({}, Metrics())
    chosen = inputs.mask & (inputs.row("chosen") > 0)
    loss = keep(-inputs.policy_logprobs, chosen)
    return TokenLoss({"nll": 2 * nll_coef * loss}, Metrics({"nll_chosen": masked_mean(loss, chosen)}))


def rows_of_pairs(inputs: LossInputs) -> Tensor:
    """int64 [P, 2]: the row of each pair's chosen and of its rejected response. Raises ColumnError for any other group."""
    assert inputs.groups is not None, "a loss on pairs is given the groups of its rows"
    chosen_B, groups = inputs.of_rows("chosen").bool(), Groups(inputs.groups)
    if (groups.sizes != 2).any() or (groups.totals(to_array(chosen_B)) != 1).any():
        raise ColumnError("a pair is a group of two rows, one of them chosen; this batch holds a group that is not")
    pairs_P2 = torch.empty(len(groups.sizes), 2, dtype=torch.int64)
    pairs_P2[torch.from_numpy(groups.index), (~chosen_B).long()] = torch.arange(len(chosen_B))
    return pairs_P2


def _on_rows(inputs: LossInputs, result: PairLoss, pairs_P2: Tensor) -> TokenLoss:
    """Each pair's loss on all tokens of its two rows, and metrics over pairs."""
    loss_B = result.loss.new_zeros(len(inputs.lengths)).index_put((pairs_P2,), result.loss[:, None])
    num, (chosen, rejected) = len(pairs_P2), result.rewards.double().unbind(1)
    sums = {
        "preference_accuracy": (chosen > rejected).sum(),
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "reward_margin": (chosen - rejected).sum(),
    }
    metrics = Metrics({name: Metric(float(total), num) for name, total in sums.items()})
    return TokenLoss({"preference": keep(on_tokens(loss_B, inputs.lengths), inputs.mask)}, metrics)


@checked
def reward_model_loss(scores_P2: Tensor, margin_P: Tensor | None = None, *, centre_coef: float = 0.0) -> PairLoss:
    """-ls(s_c - s_r - margin) + centre_coef (s_c + s_r)^2 (Bradley-Terry; margin: Llama 2, arXiv 2307.09288).

    It is also log(1 + exp(s_r - s_c)), computed without overflow.
    """
    chosen, rejected = scores_P2.unbind(1)
    gap = chosen - rejected if margin_P is None else chosen - rejected - margin_P
    return PairLoss(softplus(-gap) + centre_coef * (chosen + rejected) ** 2, scores_P2.detach())


@whole_groups
def reward_model_term(inputs: LossInputs, *, centre_coef: float = 0.0) -> TokenLoss:
    """-ls(s_c - s_r - margin) + centre_coef (s_c + s_r)^2, ls = log sigmoid (Bradley-Terry; margin: Llama 2, arXiv 2307.09288).

    A response's score s is the model's value at its last counted token, which is that of the state before it: all of a
    response but the token that ends it. Reads chosen, and margins, where the margin of a pair stands on both of its rows.

    centre_coef: how strongly the two scores of a pair are held around 0, which a difference leaves open (arXiv 2312.09244).
    """
    check(centre_coef >= 0, f"centre_coef must not be negative, got {centre_coef}")
    pairs_P2, last_N = rows_of_pairs(inputs), CountedTokens(inputs.mask, inputs.lengths).last()
    score_B = row_sum(inputs.new_values, last_N, inputs.lengths)
    margin_P = inputs.of_rows("margins")[pairs_P2[:, 0]]
    return _on_rows(inputs, reward_model_loss(score_B[pairs_P2], margin_P, centre_coef=centre_coef), pairs_P2)


@checked
def implicit_reward_loss(implicit_q_B: Tensor, correct_B: Tensor, *, implicit_beta: float = 0.05) -> Tensor:
    """Binary cross-entropy of sigmoid(implicit_beta sum_t q_t) with the outcome: [B] (implicit PRM, arXiv 2412.01981).

    implicit_q_B: the sum over a row of log pi_model - log pi_ref, with gradient. correct_B: 1 where the outcome is right, else 0.
    """
    logit = implicit_beta * implicit_q_B
    return softplus(logit) - correct_B * logit


@whole_rows
def implicit_reward_term(inputs: LossInputs, *, implicit_beta: float = 0.05) -> TokenLoss:
    """Binary cross-entropy of sigmoid(implicit_beta sum_t (x - f)) with whether R > 0, a row each (PRIME, arXiv 2502.01456).

    x are the logprobs of the process reward model and f those of column ref_logprobs; reads rewards too.
    """
    check(implicit_beta > 0, f"implicit_beta must be positive, got {implicit_beta}")
    q_B = row_sum(inputs.policy_logprobs - inputs.token("ref_logprobs"), inputs.mask, inputs.lengths)
    right_B, counted_B = inputs.of_rows("rewards") > 0, row_counts(inputs.mask, inputs.lengths) > 0
    loss_B = implicit_reward_loss(q_B, right_B.to(q_B.dtype), implicit_beta=implicit_beta)
    agree = ((q_B.detach() > 0) == right_B)[counted_B]
    metrics = Metrics({"implicit_accuracy": Metric(float(agree.sum()), float(len(agree)))})
    return TokenLoss({"implicit_reward": keep(on_tokens(loss_B, inputs.lengths), inputs.mask)}, metrics)


@checked
def implicit_reward_accuracy(implicit_q_B: Tensor, correct_B: Tensor, groups_B: Tensor) -> tuple[Tensor, Tensor]:
    """How well sum_t q_t tells right rows from wrong ones (PRIME's dpo_accuracy and dpo_abs_accuracy).

    The first: over groups with both outcomes, the share of (right, wrong) pairs in which the right row has the higher sum,
    weighed by the rows of the group. The second: the share of rows whose sign is that of their outcome.
    """
    right = correct_B > 0
    same_BB = groups_B[:, None] == groups_B
    pairs_BB = same_BB & right[:, None] & ~right
    ordered_BB = (implicit_q_B[:, None] > implicit_q_B) & pairs_BB
    pairs_B, ordered_B = (same_BB.long() @ table.sum(1) for table in (pairs_BB, ordered_BB))
    has_pairs = pairs_B > 0
    accuracy = (ordered_B[has_pairs] / pairs_B[has_pairs]).double().mean() if bool(has_pairs.any()) else torch.tensor(torch.nan)
    absolute = ((implicit_q_B > 0) == right).double().mean()
    return accuracy, absolute
