"""Laws 3, 5 and 6 for every row, loss and correction of the table: what may be done to a batch without changing its update.

Each law takes a batch to another one, and the loss and the gradient of each token must be those of before. All columns
that depend on the whole batch (advantages, corrections, tokens chosen by their covariance, weights) are made again by the
functions that the pipeline's stages call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tandem.algos import extra_terms, functions, kl, policy_losses, ratios, segments, selection
from tandem.algos.columns import as_mapping, step_columns
from tandem.algos.terms import LossInputs, TokenLoss
from tandem.errors import EmptyBatchError
from tandem.types import Algorithm
from tests.algos.batches import (
    OF_PAIRS,
    SUBJECTS,
    Layout,
    batches,
    batches_of,
    draw_idle_rows,
    draw_observations,
    draw_order,
    draw_parts,
    layout_of,
    modestly,
    under_the_mask,
)
from tests.algos.pipeline import Rows, gradient, token_loss, with_choices, with_columns, with_credit
from tests.laws.breaking import Breaker

Update = tuple[float, Tensor]
"""The loss, and its gradient for each token."""


@dataclass(frozen=True)
class Before:
    """made: the batch with all columns, in float64. update: what it gives."""

    chosen: Algorithm
    rows: Rows
    made: Rows
    update: Update

    def assert_same(self, after: Update, layout: Layout | None = None, atol: float = 1e-12) -> None:
        """Wherever a token now stands; one that was not there has exactly no gradient."""
        layout = layout or layout_of(self.rows)
        loss, whole = self.update
        scale = max(1.0, abs(loss), float(whole.abs().max()))
        assert abs(after[0] - loss) <= atol * scale
        torch.testing.assert_close(after[1].double(), layout.column(whole, 0.0), atol=atol * scale, rtol=0)
        assert not bool(after[1][torch.tensor([token is None for token in layout.tokens], dtype=torch.bool)].any())

    def assert_same_in(self, layout: Layout) -> None:
        """Advantages are float32, so that sums in another order differ by 1e-7."""
        self.assert_same(gradient(self.chosen, with_columns(self.chosen, layout.of(self.rows))), layout, 1e-6)


def micro_batches_on_ranks(before: Before, draw: st.DataObject) -> None:
    """Law 3. Columns are made before the split; each rank's weights make up for the mean over ranks."""
    parts = draw_parts(draw, before.rows, whole_groups=before.chosen.name in OF_PAIRS)
    ranks = draw.draw(st.sampled_from([1, 2, 3]))
    made = {**before.made, **step_columns(before.chosen, before.made, ranks=ranks)}
    found = [gradient(before.chosen, part.of(made)) for part in parts]
    dealt = Layout([row for part in parts for row in part.rows])
    update = sum(loss for loss, _ in found) / ranks, torch.cat([part for _, part in found]) / ranks
    before.assert_same(update, dealt, 1e-12 if ranks == 1 else 1e-6)


def order_of_rows(before: Before, draw: st.DataObject) -> None:
    """Law 3. Which of several tokens of equal covariance KL-Cov takes is left to their order, so that there must be none."""
    if "most_covariant" in before.made:
        covariances = selection.covariances(before.made["old_logprobs"], before.made["advantages"], before.made["mask"])
        if len(covariances[before.made["mask"]].unique()) < int(before.made["mask"].sum()):
            return
    before.assert_same_in(draw_order(draw, before.rows))


def idle_rows(before: Before, draw: st.DataObject) -> None:
    """Law 3: rows of padding and rows that are masked. A pair is whole, so that a loss on pairs takes no third row."""
    if before.chosen.name not in OF_PAIRS:
        before.assert_same_in(draw_idle_rows(draw, before.rows))


def observations(before: Before, draw: st.DataObject) -> None:
    """Law 6: masked tokens between the others, and tails of them."""
    before.assert_same_in(draw_observations(draw, before.rows))


def garbage_under_the_mask(before: Before, draw: st.DataObject) -> None:
    """Law 3: put there again before each step, so that none reads it; to the bit."""
    garbage, chosen = draw.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf])), before.chosen
    dirty = under_the_mask(before.rows, garbage)
    if chosen.advantage is not None:
        dirty = under_the_mask(with_credit(chosen, dirty), garbage)
        dirty = under_the_mask(with_choices(chosen, dirty), garbage)
    dirty = under_the_mask({**dirty, **step_columns(chosen, dirty)}, garbage)
    loss, found = gradient(chosen, dirty)
    assert loss == before.update[0]
    assert torch.equal(found, before.update[1])
    assert not bool(found[~before.rows["mask"]].any())


def float32(before: Before, draw: st.DataObject) -> None:
    """Law 3. Numbers are multiples of 2^-16, which float32 holds, so that both see the same ones."""
    single = {name: column.float() if column.is_floating_point() else column for name, column in before.rows.items()}
    before.assert_same(gradient(before.chosen, with_columns(before.chosen, single)), atol=1e-4)


def on_policy(before: Before, draw: st.DataObject) -> None:
    """Law 5: sampler, trainer and reference are one, and every ratio is exactly 1, every KL exactly 0."""
    ours = before.rows["logprobs"]
    rows = {**before.rows, "old_logprobs": ours, "rollout_logprobs": ours, "ref_logprobs": ours, "teacher_logprobs": ours}
    rows["teacher_topk_logprobs"] = rows["topk_logprobs"]
    made = with_columns(before.chosen, rows)
    if "correction" in made:
        assert torch.equal(made["correction"], made["mask"].to(made["correction"].dtype))
    metrics = token_loss(before.chosen, made, ours, made["topk_logprobs"]).metrics.values_by_name()
    exactly = {"ratio": 1.0, "ratio_max": 1.0, "kl_old_new": 0.0, "kl_ref": 0.0, "kl_distillation": 0.0, "squared_log_ratio": 0.0}
    rounding = 1e-12 if "jsd_distillation" in before.chosen.loss else 0  # which goes through a mixture of the two
    for name in exactly.keys() & metrics.keys():
        assert abs(metrics[name] - exactly[name]) <= rounding, name


Law = Callable[[Before, st.DataObject], None]
LAWS: list[Law] = [
    micro_batches_on_ranks,
    order_of_rows,
    idle_rows,
    observations,
    garbage_under_the_mask,
    float32,
    on_policy,
]


def check(name: str, *laws: Law) -> None:
    chosen = SUBJECTS[name]

    @modestly
    @given(batches_of(name), st.data())
    def all_hold(rows: Rows, draw: st.DataObject) -> None:
        try:
            made = with_columns(chosen, rows)
        except EmptyBatchError:  # a correction with denominator=kept may leave nothing
            assume(False)
            raise
        before = Before(chosen, rows, made, gradient(chosen, made))
        for law in laws:
            law(before, draw)

    all_hold()


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_laws_hold_for(name: str) -> None:
    check(name, *LAWS)


@modestly
@given(batches(), st.data())
def check_the_reward_credited_is_the_reward_given(rows: Rows, draw: st.DataObject) -> None:
    """Law 6: on a row's last counted token, whatever stands behind it; the first one has all of it as its return."""
    rows = draw_observations(draw, rows).of(rows)
    made = with_credit(replace(SUBJECTS["reinforce_pp"], advantage="discounted_returns"), rows)
    learns = segments.row_counts(rows["mask"], rows["lengths"]) > 0
    given_B = torch.where(learns, rows["rewards"], 0.0)
    assert torch.equal(segments.row_sum(made["token_rewards"], rows["mask"], rows["lengths"]), given_B)
    for returned, counted, given_one in zip(
        made["returns"].split(rows["lengths"].tolist()), rows["mask"].split(rows["lengths"].tolist()), given_B, strict=True
    ):
        assert bool((returned[counted] == given_one).all())


test_the_reward_credited_is_the_reward_given = check_the_reward_credited_is_the_reward_given


def test_every_function_of_the_table_is_in_some_subject() -> None:
    used = {part for chosen in SUBJECTS.values() for part in chosen.loss.split("+")}
    assert used == functions.LOSSES.keys()
    estimators = {part for chosen in SUBJECTS.values() for part in (chosen.advantage or "").split("+")} - {""}
    assert estimators == functions.ADVANTAGES.keys()
    corrected = {name for chosen in SUBJECTS.values() for name in as_mapping(chosen.params.get("correction"))}
    assert corrected == functions.CORRECTIONS.keys()


# ---------------------------------------------------------------------------------------------------- breakers


def _chooses_in_the_micro_batch(inputs: LossInputs, **params: float | None) -> TokenLoss:
    chosen = selection.most_covariant(inputs.token("old_logprobs"), inputs.token("advantages"), inputs.mask, cov_frac=0.4)
    return _KL_COV(replace(inputs, columns={**inputs.columns, "most_covariant": chosen}), **params)  # type: ignore[arg-type]


def _normalises_in_the_micro_batch(inputs: LossInputs, **params: float | None) -> TokenLoss:
    weights = inputs.token("correction")
    normalised = weights / (weights.sum() / inputs.mask.sum().clamp(min=1))
    return _PPO_CLIP(replace(inputs, columns={**inputs.columns, "correction": normalised}), **params)  # type: ignore[arg-type]


def _averages_in_the_micro_batch(inputs: LossInputs, *, positive_nll_weight: float = 0.1) -> TokenLoss:
    positive = inputs.mask & (inputs.row("rewards") > 0)
    scale = positive / (positive.sum().clamp(min=1) * torch.where(positive, inputs.columns["loss_weights"], 1.0))
    return _POSITIVE_NLL(
        replace(inputs, columns={**inputs.columns, "positive_scale": scale}), positive_nll_weight=positive_nll_weight
    )


def _draws_the_first(
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    uniforms_N: Tensor,
    *,
    cov_frac: float,
    cov_low: float,
    cov_high: float,
) -> Tensor:
    first_N = torch.arange(len(mask_N))
    return _RANDOM_COVARIANT(old_logprobs_N, advantages_N, mask_N, first_N, cov_frac=cov_frac, cov_low=cov_low, cov_high=cov_high)


def _every_token_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    return lengths


def _of_any_kind(counted: segments.CountedTokens, mask: Tensor, lengths: Tensor) -> None:
    _COUNTED(counted, torch.ones_like(mask), lengths)


def _multiplies(values: Tensor, mask: Tensor, num_counted: int | None = None) -> Tensor:
    return values * mask


def _in_half_precision(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return _ROW_MEAN(values.bfloat16() if values.dtype == torch.float32 else values, mask, lengths)


def _nearly(logprobs: Tensor, old_logprobs: Tensor, clamp: float | None) -> Tensor:
    return _LOG_RATIO(logprobs, old_logprobs, clamp) + 1e-6


def _never_below(logprobs: Tensor, ref: Tensor, **how: Any) -> Tensor:
    return _KL_DIVERGENCE(logprobs, ref, **how) + 1e-8


_KL_COV, _PPO_CLIP, _POSITIVE_NLL = policy_losses.kl_cov, policy_losses.ppo_clip, extra_terms.positive_nll
_RANDOM_COVARIANT, _KL_DIVERGENCE, _LOG_RATIO = selection.random_covariant, kl.kl_divergence, ratios.log_ratio
_COUNTED, _ROW_MEAN = segments.CountedTokens.__init__, segments.row_mean


def _breaker(law: int, name: str, target: str, replacement: Any, subject: str, check_of: Law) -> Breaker:
    return Breaker(law, name, f"tandem.algos.{target}", replacement, partial(check, subject, check_of))


BREAKERS = [
    _breaker(
        3,
        "KL-Cov chooses in the micro-batch",
        "policy_losses:kl_cov",
        _chooses_in_the_micro_batch,
        "kl_cov with many",
        micro_batches_on_ranks,
    ),
    _breaker(
        3,
        "weights are normalised in the micro-batch",
        "policy_losses:ppo_clip",
        _normalises_in_the_micro_batch,
        "grpo with normalised token_tis",
        micro_batches_on_ranks,
    ),
    _breaker(
        3,
        "VAPO averages in the micro-batch",
        "extra_terms:positive_nll",
        _averages_in_the_micro_batch,
        "vapo",
        micro_batches_on_ranks,
    ),
    _breaker(3, "Clip-Cov draws by position", "selection:random_covariant", _draws_the_first, "clip_cov with many", order_of_rows),
    _breaker(
        3,
        "rows without a counted token have a ratio",
        "corrections:row_counts",
        _every_token_counts,
        "grpo with normalised seq_tis",
        idle_rows,
    ),
    _breaker(3, "rows without a counted token are companions", "segments:row_counts", _every_token_counts, "prime", idle_rows),
    _breaker(
        3,
        "masks multiply instead of selecting",
        "checks:keep",
        _multiplies,
        "grpo with normalised token_tis",
        garbage_under_the_mask,
    ),
    _breaker(3, "a row's mean in half precision", "sequence_losses:row_mean", _in_half_precision, "gmpo", float32),
    _breaker(5, "the ratio is nearly 1", "policy_losses:log_ratio", _nearly, "grpo", on_policy),
    _breaker(5, "the KL has a floor", "extra_terms:kl_divergence", _never_below, "grpo", on_policy),
    _breaker(6, "the critic looks at observations", "segments:CountedTokens.__init__", _of_any_kind, "ppo", observations),
    Breaker(
        6,
        "the reward sits on the last token, which may be masked",
        "tandem.algos.segments:CountedTokens.__init__",
        _of_any_kind,
        check_the_reward_credited_is_the_reward_given,
    ),
]
