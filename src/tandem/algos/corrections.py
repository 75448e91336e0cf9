"""Corrections of the mismatch between the sampler's logprobs and the trainer's: which tokens count, and for how much.

With rho = exp(old_logprobs - rollout_logprobs), each gives weights, or a choice of tokens to keep, or both. They are
constants of the whole batch, made before it is split: policy terms are multiplied by the weight of a kept token and by 0
elsewhere. Whether dropped tokens stay in the denominator is the aggregation's business (`denominator`).
`combine` joins several: tokens are kept that all keep, and one of them at most weighs in its own way.

Legend: B rows, N packed tokens; o old_logprobs, b rollout_logprobs, l = o - b, p = exp(o), q = exp(b).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tandem.algos.checks import checked, keep
from tandem.algos.ratios import check, check_choice, log_ratio
from tandem.algos.segments import on_tokens, row_counts, row_max, row_mean, row_sum
from tandem.algos.terms import masked_mean, whole_rows
from tandem.types import Metric, Metrics

Weighs = Literal["not", "ratio", "own"]
Gates = Literal["nothing", "token", "row"]

LOG_RATIO_CLAMP = 20.0
"""Default of `log_ratio_clamp`: l is clamped to this, either side, before exp; None does not clamp."""
PROBABILITY_FLOOR = 1e-6
"""Two-outcome divergences take probabilities from [this, 1 - this]: a certain token keeps a finite divergence, 0 to itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """kept: bool [N], tokens that stay. weights: [N], of each counted token, kept or not; 1 with weighs "not", rho with "ratio".

    gates: what is kept or dropped as one, single tokens or whole rows. metrics: what share of them was dropped.
    """

    kept: Tensor
    weights: Tensor
    weighs: Weighs = "not"
    gates: Gates = "nothing"
    metrics: Mapping[str, Metric] | None = None

    @property
    def column(self) -> Tensor:
        """Column `correction`, [N]: weight where kept, 0 elsewhere."""
        return keep(self.weights, self.kept)


# -------------------------------------------------------------------------------------------------- weights


@checked
def token_tis(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    *,
    low: float | None = None,
    high: float = 2.0,
    normalize: bool = False,
    log_ratio_clamp: float | None = LOG_RATIO_CLAMP,
) -> Correction:
    """Weights clip(rho, low, high) (truncated importance sampling, fengyao.notion.site/off-policy-rl).

    normalize: divide by the mean weight of the batch.
    """
    _check_bounds(low, high)
    weights = keep(log_ratio(old_logprobs_N, rollout_logprobs_N, log_ratio_clamp).exp().clamp(low, high), mask_N)
    if normalize:
        weights = weights / (weights.sum() / mask_N.sum().clamp(min=1))
    return Correction(mask_N, weights, "own")


@whole_rows
@checked
def seq_tis(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    low: float | None = None,
    high: float = 5.0,
    normalize: bool = False,
) -> Correction:
    """Weights w_i = clip(exp(sum_t l), low, high): one weight a row. normalize: divide by the mean over rows."""
    _check_bounds(low, high)
    ratio_B = row_sum(log_ratio(old_logprobs_N, rollout_logprobs_N, None), mask_N, lengths_B)
    weights_B = ratio_B.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp().clamp(low, high)
    if normalize:
        weights_B = weights_B / weights_B[row_counts(mask_N, lengths_B) > 0].mean()
    return Correction(mask_N, keep(on_tokens(weights_B, lengths_B), mask_N), "own")


# ----------------------------------------------------------------------------------------------- token gates


@checked
def icepop(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
    log_ratio_clamp: float | None = LOG_RATIO_CLAMP,
) -> Correction:
    """Keep low <= rho <= high, weigh by rho: what is outside is dropped and not truncated (IcePop; Ring-1T, arXiv 2510.18855)."""
    _check_bounds(low, high)
    ratio = log_ratio(old_logprobs_N, rollout_logprobs_N, log_ratio_clamp).exp()
    return _of_tokens(mask_N, (ratio >= low) & (ratio <= high), ratio, "ratio")


@checked
def kpop(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    *,
    high: float = 0.1,
    probability_floor: float = PROBABILITY_FLOOR,
    log_ratio_clamp: float | None = LOG_RATIO_CLAMP,
) -> Correction:
    """Keep KL_B(p, q) <= high and KL_B(q, p) <= high, weigh by rho (KPop, ringtech.notion.site/kpop)."""
    _check_divergence(high)
    check(0 < probability_floor < 0.5, f"probability_floor must be between 0 and 0.5, got {probability_floor}")
    forward = binary_kl(old_logprobs_N, rollout_logprobs_N, probability_floor)
    backward = binary_kl(rollout_logprobs_N, old_logprobs_N, probability_floor)
    ratio = log_ratio(old_logprobs_N, rollout_logprobs_N, log_ratio_clamp).exp()
    return _of_tokens(mask_N, (forward <= high) & (backward <= high), ratio, "ratio")


@checked
def token_trust_region(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    *,
    divergence: Literal["binary_kl", "tv"] = "binary_kl",
    high: float = 0.05,
    log_ratio_clamp: float | None = LOG_RATIO_CLAMP,
) -> Correction:
    """Keep D(q, p) <= high, weigh by rho; D is the two-outcome KL from the sampler's side, or |q - p| (OpenRLHF)."""
    _check_divergence(high)
    found = _divergence(divergence, old_logprobs_N, rollout_logprobs_N)
    ratio = log_ratio(old_logprobs_N, rollout_logprobs_N, log_ratio_clamp).exp()
    return _of_tokens(mask_N, found <= high, ratio, "ratio")


@checked
def m2po(old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, mask_N: Tensor, *, m2_threshold: float = 0.04) -> Correction:
    """Drop tokens of the largest l^2, as few as it takes for the mean of the rest to be < m2_threshold (M2PO, arXiv 2510.01161).

    Over the whole batch. The last token is never dropped. Tokens of equal l^2 drop in the order of the batch.
    """
    check(m2_threshold > 0, f"m2_threshold must be positive, got {m2_threshold}")
    squared_M = log_ratio(old_logprobs_N, rollout_logprobs_N, None)[mask_N].double() ** 2
    descending = torch.sort(squared_M, descending=True, stable=True)
    left_M = torch.arange(len(squared_M), 0, -1, device=squared_M.device)
    mean_of_rest_M = descending.values.flip(0).cumsum(0).flip(0) / left_M
    drops = int((mean_of_rest_M >= m2_threshold).sum().clamp(max=max(len(squared_M) - 1, 0)))
    kept_M = torch.ones_like(squared_M, dtype=torch.bool).index_fill(0, descending.indices[:drops], False)
    return _of_tokens(mask_N, torch.zeros_like(mask_N).masked_scatter(mask_N, kept_M), None, "not")


# ------------------------------------------------------------------------------------------------- row gates


@whole_rows
@checked
def sequence_mask(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    ratio: Literal["geometric", "product", "outlier"] = "geometric",
    weight: Literal["none", "token", "row"] = "none",
    low: float | None = None,
    high: float = 2.0,
    log_ratio_clamp: float | None = LOG_RATIO_CLAMP,
) -> Correction:
    """Keep rows whose ratio is in [low, high]: exp(mean_t l), exp(sum_t l), or rho of every token.

    weight: kept tokens count 1, their own rho (seq-mask-tis: OpenRLHF, NeMo), or the row's ratio (TRL's and AReaL's masks).
    """
    _check_bounds(low, high)
    check_choice("ratio", ratio, ("geometric", "product", "outlier"))
    check_choice("weight", weight, ("none", "token", "row"))
    check(not (ratio == "outlier" and weight == "row"), "weight=row needs a ratio of the row, which ratio=outlier has not")
    plain = log_ratio(old_logprobs_N, rollout_logprobs_N, None)
    token = log_ratio(old_logprobs_N, rollout_logprobs_N, log_ratio_clamp).exp()
    if ratio == "outlier":
        outside = (token > high) | (token < (low or 0.0))
        return _of_rows(mask_N, lengths_B, row_max(outside.float(), mask_N, lengths_B) == 0, token, weight == "token")
    reduce = row_mean if ratio == "geometric" else row_sum
    ratio_B = reduce(plain, mask_N, lengths_B).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    inside_B = (ratio_B <= high) & (ratio_B >= (low or 0.0))
    if weight == "row":
        gated = _of_rows(mask_N, lengths_B, inside_B, token, False)
        return Correction(gated.kept, keep(on_tokens(ratio_B, lengths_B), mask_N), "own", "row", gated.metrics)
    return _of_rows(mask_N, lengths_B, inside_B, token, weight == "token")


@whole_rows
@checked
def seq_mask_tis(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    low: float = 0.999,
    high: float = 1.002,
    log_ratio_clamp: float | None = LOG_RATIO_CLAMP,
) -> Correction:
    """Keep rows with low <= exp(mean_t l) <= high, weigh kept tokens by their own rho (OpenRLHF, NeMo-RL)."""
    return sequence_mask(
        old_logprobs_N, rollout_logprobs_N, mask_N, lengths_B, weight="token", low=low, high=high, log_ratio_clamp=log_ratio_clamp
    )


@whole_rows
@checked
def sequence_trust_region(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    divergence: Literal["binary_kl", "tv"] = "binary_kl",
    high: float = 3e-3,
    log_ratio_clamp: float | None = LOG_RATIO_CLAMP,
) -> Correction:
    """Keep rows with mean_t D(q, p) <= high, weigh kept tokens by rho (FlashREINFORCE, Hu et al.; OpenRLHF)."""
    _check_divergence(high)
    found_B = row_mean(_divergence(divergence, old_logprobs_N, rollout_logprobs_N), mask_N, lengths_B)
    ratio = log_ratio(old_logprobs_N, rollout_logprobs_N, log_ratio_clamp).exp()
    return _of_rows(mask_N, lengths_B, found_B <= high, ratio, True)


@whole_rows
@checked
def off_policy_sequence_mask(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    delta: float = 1e-4,
) -> Correction:
    """Drop tokens with A < 0 in rows with mean_t(b - o) > delta: failures the policy has moved away from (OPSM, DeepSeek-V3.2)."""
    check(math.isfinite(delta), f"delta must be finite, got {delta}")
    away_B = row_mean(-log_ratio(old_logprobs_N, rollout_logprobs_N, None), mask_N, lengths_B)
    dropped = on_tokens(away_B > delta, lengths_B) & (advantages_N < 0)
    dropped_B = row_max(dropped.float(), mask_N, lengths_B) > 0
    gated = _of_rows(mask_N, lengths_B, ~dropped_B, None, False)
    return Correction(mask_N & ~dropped, gated.weights, "not", "row", gated.metrics)


# ---------------------------------------------------------------------------------------- rejection sampling


@checked
def rejection_sampling(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    mode: str = "token_k1",
    threshold: str = "0.5_2.0",
) -> Correction:
    """Keep what passes every test of `mode`, without weights (verl's rollout rejection sampling).

    k1 = -l, k2 = l^2 / 2, k3 = exp(l) - 1 - l. A test is a scope, token, seq_sum, seq_mean or seq_max, and an estimator, as in
    "seq_mean_k3"; several are joined by commas, and so are their thresholds. k1 tests take bounds of exp(k1), the sampler's
    probability over the trainer's: "low_high", or "u" for 1/u to u; the others take the largest value allowed.
    """
    tests, thresholds = mode.split(","), threshold.split(",")
    check(
        len(tests) == len(thresholds), f"mode={mode!r} has {len(tests)} tests and threshold={threshold!r} {len(thresholds)} bounds"
    )
    kept = mask_N
    for test, bound in zip(tests, thresholds, strict=True):
        kept = kept & _passes(test.strip(), bound.strip(), old_logprobs_N, rollout_logprobs_N, mask_N, lengths_B)
    gates: Gates = "token" if any(test.strip().startswith("token") for test in tests) else "row"
    touched_B = (row_counts(mask_N, lengths_B) > row_counts(kept, lengths_B))[row_counts(mask_N, lengths_B) > 0]
    metrics = {
        "correction_filtered": masked_mean(~kept, mask_N),
        "correction_filtered_rows": Metric(float(touched_B.sum()), float(len(touched_B))),
    }
    return Correction(kept, keep(torch.ones_like(old_logprobs_N), mask_N), "not", gates, metrics)


def _passes(test: str, bound: str, old_N: Tensor, rollout_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    scope, _, estimator = test.rpartition("_")
    check(scope in ("token", "seq_sum", "seq_mean", "seq_max") and estimator in ("k1", "k2", "k3"), f"mode={test!r}: unknown test")
    check(test != "seq_max_k1", "mode=seq_max_k1 has no meaning: k1 has both signs")
    difference = log_ratio(old_N, rollout_N, LOG_RATIO_CLAMP)
    value = {"k1": -difference, "k2": difference**2 / 2, "k3": difference.exp() - 1 - difference}[estimator]
    if scope != "token":
        reduce = {"seq_sum": row_sum, "seq_mean": row_mean, "seq_max": row_max}[scope]
        value = on_tokens(reduce(value, mask_N, lengths_B), lengths_B)
    bounds = _bounds(bound)
    if estimator != "k1":
        check(
            len(bounds) == 1,
            f"threshold={bound!r} of mode {test}: a divergence has an upper bound only, one number that is not negative",
        )
        return value <= bounds[0]
    high = bounds[-1] if bounds else 0.0
    low = bounds[0] if len(bounds) == 2 else 1 / high if high else 0.0
    check(
        0 < low <= high, f"threshold={bound!r} of mode {test}: two numbers with 0 < low <= high are needed, as in '0.5_2.0', or one"
    )
    return (value >= torch.tensor(low, dtype=torch.float64).log()) & (value <= torch.tensor(high, dtype=torch.float64).log())


def _bounds(threshold: str) -> tuple[float, ...]:
    """The one or two numbers of "high" or "low_high"; nothing if it is something else."""
    try:
        found = tuple(map(float, threshold.split("_")))
    except ValueError:
        return ()
    return found if len(found) <= 2 and all(0 <= each < math.inf for each in found) else ()


# ------------------------------------------------------------------------------------------------- together


def combine(corrections: Sequence[Correction]) -> Correction:
    """Keeps what all keep. Raises ValueError for two that weigh tokens in different ways; rho counts once."""
    weighing = [each for each in corrections if each.weighs != "not"]
    check(
        len(weighing) <= 1 or all(each.weighs == "ratio" for each in weighing),
        "two corrections weigh tokens in different ways; keep one of them, and combine it with gates that do not weigh",
    )
    chosen = (weighing or corrections)[0]
    kept = corrections[0].kept
    for each in corrections[1:]:
        kept = kept & each.kept
    gated = {each.gates for each in corrections}
    gates: Gates = "token" if "token" in gated else "row" if "row" in gated else "nothing"
    metrics = Metrics()
    for each in corrections:
        metrics += Metrics(each.metrics or {})
    return Correction(kept, chosen.weights, chosen.weighs, gates, dict(metrics))


# --------------------------------------------------------------------------------------------------- pieces


def binary_kl(logprobs_N: Tensor, other_logprobs_N: Tensor, probability_floor: float = PROBABILITY_FLOOR) -> Tensor:
    """KL of "this token or another": p log(p / q) + (1 - p) log((1 - p) / (1 - q)), [N] float64, p = exp(logprobs)."""
    p, q = (values.double().exp().clamp(probability_floor, 1 - probability_floor) for values in (logprobs_N, other_logprobs_N))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _divergence(name: Literal["binary_kl", "tv"], old_N: Tensor, rollout_N: Tensor) -> Tensor:
    check_choice("divergence", name, ("binary_kl", "tv"))
    return binary_kl(rollout_N, old_N) if name == "binary_kl" else (rollout_N.double().exp() - old_N.double().exp()).abs()


def _of_tokens(mask_N: Tensor, inside_N: Tensor, ratio_N: Tensor | None, weighs: Weighs) -> Correction:
    weights = torch.ones_like(mask_N, dtype=torch.float32) if ratio_N is None else ratio_N
    metrics = {"correction_filtered": masked_mean(~inside_N, mask_N)}
    return Correction(mask_N & inside_N, keep(weights, mask_N), weighs, "token", metrics)


def _of_rows(mask_N: Tensor, lengths_B: Tensor, inside_B: Tensor, ratio_N: Tensor | None, by_ratio: bool) -> Correction:
    weights = torch.ones_like(mask_N, dtype=torch.float32) if ratio_N is None or not by_ratio else ratio_N
    dropped_B = (~inside_B)[row_counts(mask_N, lengths_B) > 0]
    metrics = {"correction_filtered": Metric(float(dropped_B.sum()), float(len(dropped_B)))}
    kept = mask_N & on_tokens(inside_B, lengths_B)
    return Correction(kept, keep(weights, mask_N), "ratio" if by_ratio else "not", "row", metrics)


def _check_bounds(low: float | None, high: float) -> None:
    check(high > 0, f"high must be positive, got {high}")
    check(low is None or 0 <= low <= high, f"low must satisfy 0 <= low <= high={high}, got {low}")


def _check_divergence(high: float) -> None:
    check(high > 0, f"high bounds a divergence and must be positive, got {high}")
