"""Corrections on rows small enough to do by hand: rho is given, and old_logprobs are 0 more than the sampler's by its log."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.algos import corrections
from tandem.algos.corrections import Correction, binary_kl, combine
from tandem.algos.terms import scope_of

MASK = torch.tensor([True, True, False, True, True, True])
LENGTHS = torch.tensor([3, 2, 1])
NEAR = [1.0, 1.5, 9.0, 0.8, 0.5, 1.0]
"""Ratios of rows (1, 1.5), (0.8, 0.5) and (1); the one that is masked would be far out."""


def columns(ratios: list[float], sampled: float = -1.0) -> tuple[Tensor, Tensor]:
    """old_logprobs and rollout_logprobs with these ratios."""
    rollout = torch.full((len(ratios),), sampled, dtype=torch.float64)
    return rollout + torch.tensor(ratios, dtype=torch.float64).log(), rollout


def of_tokens(name: str, ratios: list[float] = NEAR, **params: Any) -> Correction:
    return getattr(corrections, name)(*columns(ratios), MASK, **params)


def of_rows(name: str, ratios: list[float] = NEAR, **params: Any) -> Correction:
    return getattr(corrections, name)(*columns(ratios), MASK, LENGTHS, **params)


def weights(correction: Correction) -> list[float]:
    return [round(value, 6) for value in correction.column.tolist()]


def filtered(correction: Correction, name: str = "correction_filtered") -> tuple[float, float]:
    assert correction.metrics is not None
    metric = correction.metrics[name]
    return metric.value * metric.count, metric.count


# ---------------------------------------------------------------------------------------------------- weights


def test_token_tis_truncates_on_both_sides() -> None:
    found = of_tokens("token_tis", low=0.75, high=1.2)
    assert weights(found) == [1.0, 1.2, 0.0, 0.8, 0.75, 1.0]
    assert (found.weighs, found.gates, found.metrics) == ("own", "nothing", None)
    assert torch.equal(found.kept, MASK)
    assert weights(of_tokens("token_tis")) == [1.0, 1.5, 0.0, 0.8, 0.5, 1.0]
    assert weights(of_tokens("token_tis", [3.0] * 6)) == [2.0, 2.0, 0.0, 2.0, 2.0, 2.0]


def test_normalised_weights_have_a_mean_of_one() -> None:
    mean = (1 + 1.5 + 0.8 + 0.5 + 1) / 5
    assert weights(of_tokens("token_tis", normalize=True)) == [
        round(value / mean, 6) if value else 0.0 for value in (1.0, 1.5, 0, 0.8, 0.5, 1.0)
    ]
    row = [1.5, 0.4, 1.0]
    mean = sum(row) / 3
    assert weights(of_rows("seq_tis", normalize=True)) == [round(row[i] / mean, 6) if i >= 0 else 0.0 for i in (0, 0, -1, 1, 1, 2)]
    empty = torch.zeros(6, dtype=torch.bool)
    assert corrections.token_tis(*columns(NEAR), empty, normalize=True).column.tolist() == [0.0] * 6


def test_rows_without_a_counted_token_are_not_in_the_mean_over_rows() -> None:
    mask = torch.tensor([True, False])
    found = corrections.seq_tis(*columns([2.0, 4.0]), mask, torch.tensor([1, 1]), normalize=True)
    assert found.column.tolist() == [1.0, 0.0]


def test_seq_tis_weighs_a_row_by_its_product() -> None:
    found = of_rows("seq_tis", low=0.6, high=1.25)
    assert weights(found) == [1.25, 1.25, 0.0, 0.6, 0.6, 1.0]
    assert (found.weighs, found.gates) == ("own", "nothing")
    assert weights(of_rows("seq_tis", [3.0] * 6)) == [5.0, 5.0, 0.0, 5.0, 5.0, 3.0]
    assert weights(of_rows("seq_tis", [1e9] * 6, high=1e12))[0] == pytest.approx(math.exp(20), abs=1)


@pytest.mark.parametrize("name", ["token_tis", "icepop"])
def test_log_ratios_of_tokens_are_clamped_before_exp(name: str) -> None:
    ratios = [1e30, 1.0, 1.0, 1.0, 1.0, 1e-30]
    found = of_tokens(name, ratios, low=0.0, high=1e40).weights
    assert found[[0, 5]].tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-9)
    tight = of_tokens(name, ratios, low=0.0, high=1e40, log_ratio_clamp=2.0).weights
    assert tight[[0, 5]].tolist() == pytest.approx([math.exp(2), math.exp(-2)], rel=1e-9)
    loose = of_tokens(name, ratios, low=0.0, high=1e40, log_ratio_clamp=None).weights
    assert loose[0].item() == pytest.approx(1e30)


# ------------------------------------------------------------------------------------------------ token gates


def test_icepop_drops_what_is_outside_and_keeps_its_bounds() -> None:
    exact = [1.0, 2.0, 9.0, 0.5, 0.25, 4.0]
    found = corrections.icepop(torch.tensor(exact).log(), torch.zeros(6), MASK, low=0.5, high=2.0, log_ratio_clamp=None)
    bounds = torch.tensor([0.5, 2.0]).log().exp().tolist()
    assert bounds == [0.5, 2.0]
    assert weights(found) == [1.0, 2.0, 0.0, 0.5, 0.0, 0.0]
    assert (found.weighs, found.gates) == ("ratio", "token")
    assert filtered(found) == (2.0, 5.0)


def test_two_outcome_kl_by_hand() -> None:
    p, q = 0.5, 0.25
    want = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    found = binary_kl(torch.tensor([p]).log(), torch.tensor([q]).log())
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(want, rel=1e-6)
    certain = binary_kl(torch.tensor([0.0]), torch.tensor([0.5]).log(), 1e-3)
    assert certain.item() == pytest.approx(0.999 * math.log(0.999 / 0.5) + 0.001 * math.log(0.001 / 0.5))
    never = binary_kl(torch.tensor([-100.0]), torch.tensor([0.5]).log(), 1e-3)
    assert never.item() == pytest.approx(certain.item())
    assert binary_kl(torch.zeros(1), torch.zeros(1)).item() == 0
    assert binary_kl(torch.zeros(1), torch.tensor([-100.0])).item() == pytest.approx(math.log(1e6), rel=1e-4)


def test_kpop_needs_both_directions_to_be_near() -> None:
    """P = 0.999, q = 0.99: KL(p, q) = 0.0067 and KL(q, p) = 0.0141. The ratio is 1.009."""
    old, rollout = torch.tensor([0.999] * 6).double().log(), torch.tensor([0.99] * 6).double().log()
    both = binary_kl(old, rollout)[0].item(), binary_kl(rollout, old)[0].item()
    assert both == pytest.approx((0.0067382, 0.0140666), abs=1e-7)
    for first, second in ((old, rollout), (rollout, old)):
        kept, dropped = corrections.kpop(first, second, MASK, high=0.015), corrections.kpop(first, second, MASK, high=0.01)
        assert torch.equal(kept.kept, MASK)
        assert not bool(dropped.kept.any())
        assert weights(kept)[0] == round(math.exp(float(first[0] - second[0])), 6)
        assert filtered(dropped) == (5.0, 5.0)
        assert (kept.weighs, kept.gates) == ("ratio", "token")
    exactly = corrections.kpop(old, rollout, MASK, high=both[1])
    assert torch.equal(exactly.kept, MASK)
    floored = corrections.kpop(torch.zeros(6), torch.full((6,), -50.0), MASK, high=5.0, probability_floor=1e-2)
    assert torch.equal(floored.kept, MASK)
    assert not bool(corrections.kpop(torch.zeros(6), torch.full((6,), -50.0), MASK, high=5.0).kept.any())


def test_token_trust_region_looks_from_the_samplers_side() -> None:
    """KL(q, p) = 0.0141, |q - p| = 0.009."""
    old, rollout = torch.tensor([0.999] * 6).double().log(), torch.tensor([0.99] * 6).double().log()
    for high, kept in ((0.015, True), (0.01, False)):
        found = corrections.token_trust_region(old, rollout, MASK, high=high)
        assert bool(found.kept.any()) is kept
        assert (found.weighs, found.gates) == ("ratio", "token")
    assert bool(corrections.token_trust_region(rollout, old, MASK, high=0.01).kept.any())  # 0.0067 the other way
    for high, kept in ((0.0091, True), (0.0089, False)):
        for first, second in ((old, rollout), (rollout, old)):
            found = corrections.token_trust_region(first, second, MASK, divergence="tv", high=high)
            assert bool(found.kept.any()) is kept
    halves = torch.tensor([0.5] * 6).double().log(), torch.tensor([1.0] * 6).double().log()
    assert bool(corrections.token_trust_region(*halves, MASK, divergence="tv", high=0.5).kept.any())


def test_m2po_drops_the_fewest_tokens_for_a_mean_square_below_its_threshold() -> None:
    log_ratios = torch.tensor([0.1, -0.4, 9.0, 0.2, 0.4, 0.0], dtype=torch.float64)
    rollout = torch.full((6,), -5.0, dtype=torch.float64)
    # squares of the counted ones: 0.01 0.16 0.04 0.16 0; means of what is left: 0.074, 0.0525, 0.01667, 0.005, 0
    for threshold, kept in (
        (0.08, [1, 1, 0, 1, 1, 1]),
        (0.06, [1, 0, 0, 1, 1, 1]),  # of the two equal ones the first
        (0.05, [1, 0, 0, 1, 0, 1]),
        (0.006, [1, 0, 0, 0, 0, 1]),
        (0.004, [0, 0, 0, 0, 0, 1]),
    ):
        found = corrections.m2po(rollout + log_ratios, rollout, MASK, m2_threshold=threshold)
        assert found.kept.long().tolist() == kept
        assert found.column.tolist() == kept
        assert (found.weighs, found.gates) == ("not", "token")
        assert filtered(found) == (5 - sum(kept), 5.0)
    one = corrections.m2po(torch.zeros(1), torch.ones(1), torch.tensor([True]), m2_threshold=0.5)
    assert one.kept.tolist() == [True]
    assert corrections.m2po(torch.zeros(1), torch.ones(1), torch.tensor([False])).kept.tolist() == [False]
    at = corrections.m2po(torch.tensor([0.5, 0.0]), torch.zeros(2), torch.tensor([True, True]), m2_threshold=0.125)
    assert at.kept.tolist() == [False, True]  # the mean must be below, and 0.125 is not


# -------------------------------------------------------------------------------------------------- row gates


@pytest.mark.parametrize(
    ("ratio", "low", "high", "rows"),
    [
        ("geometric", 0.7, 1.2, [0, 0, 1]),  # 1.2247, 0.6325, 1
        ("geometric", 0.6, 1.25, [1, 1, 1]),
        ("geometric", None, 1.2, [0, 1, 1]),
        ("product", 0.5, 1.4, [0, 0, 1]),  # 1.5, 0.4, 1
        ("product", 0.3, 1.6, [1, 1, 1]),
        ("product", None, 1.4, [0, 1, 1]),
        ("outlier", 0.6, 1.4, [0, 0, 1]),
        ("outlier", 0.4, 1.6, [1, 1, 1]),
        ("outlier", 0.6, 1.6, [1, 0, 1]),
        ("outlier", None, 1.4, [0, 1, 1]),
    ],
)
def test_sequence_mask_keeps_or_drops_whole_rows(ratio: str, low: float | None, high: float, rows: list[int]) -> None:
    found = of_rows("sequence_mask", ratio=ratio, low=low, high=high)
    kept = [rows[0], rows[0], 0, rows[1], rows[1], rows[2]]
    assert found.kept.long().tolist() == kept
    assert found.column.tolist() == kept
    assert (found.weighs, found.gates) == ("not", "row")
    assert filtered(found) == (3 - sum(rows), 3.0)
    token = of_rows("sequence_mask", ratio=ratio, low=low, high=high, weight="token")
    assert weights(token) == [value * keeps for value, keeps in zip(NEAR, kept, strict=True)]
    assert (token.weighs, token.gates) == ("ratio", "row")
    if ratio != "outlier":
        of_row = of_rows("sequence_mask", ratio=ratio, low=low, high=high, weight="row")
        value = [1.5**0.5, 0.4**0.5, 1.0] if ratio == "geometric" else [1.5, 0.4, 1.0]
        want = [round(value[i] * rows[i], 6) if i >= 0 else 0.0 for i in (0, 0, -1, 1, 1, 2)]
        assert weights(of_row) == want
        assert of_row.weights[MASK].tolist() == pytest.approx([value[0], value[0], value[1], value[1], value[2]])
        assert (of_row.weighs, of_row.gates) == ("own", "row")
        assert filtered(of_row) == (3 - sum(rows), 3.0)


def test_bounds_of_a_row_are_inside() -> None:
    ones = [1.0] * 6
    for ratio in ("geometric", "product", "outlier"):
        for low, high in ((1.0, 2.0), (0.5, 1.0)):
            found = corrections.sequence_mask(*columns(ones), MASK, LENGTHS, ratio=ratio, low=low, high=high)  # type: ignore[arg-type]
            assert torch.equal(found.kept, MASK)


def test_ratios_of_rows_and_tokens_are_clamped() -> None:
    far = [1e30, 1e30, 1.0, 1e-30, 1e-30, 1.0]
    row = of_rows("sequence_mask", far, ratio="product", weight="row", low=0.0, high=1e40).weights
    assert row[[0, 3]].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    token = of_rows("sequence_mask", far, weight="token", low=0.0, high=1e40).weights
    assert token[[0, 3]].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    token = of_rows("sequence_mask", far, weight="token", low=0.0, high=1e40, log_ratio_clamp=1.0).weights
    assert token[[0, 3]].tolist() == pytest.approx([math.e, 1 / math.e])
    token = of_rows("sequence_mask", far, weight="token", low=0.0, high=1e40, log_ratio_clamp=None).weights
    assert token[0].item() == pytest.approx(1e30)
    for clamp, want in ((2.0, math.exp(2)), (None, 1e30)):
        assert of_rows("seq_mask_tis", far, low=0.0, high=1e40, log_ratio_clamp=clamp).weights[0].item() == pytest.approx(want)
    rollout = torch.full((6,), -80.0, dtype=torch.float64)  # so unlikely that the divergence is small
    for clamp, want in ((2.0, math.exp(2)), (None, math.exp(30)), (20.0, math.exp(20))):
        for name, rest in (("sequence_trust_region", (MASK, LENGTHS)), ("token_trust_region", (MASK,)), ("kpop", (MASK,))):
            found = getattr(corrections, name)(rollout + 30, rollout, *rest, log_ratio_clamp=clamp)
            assert found.column[0].item() == pytest.approx(want)


def test_seq_mask_tis_gates_by_the_geometric_mean_and_weighs_by_token() -> None:
    found = of_rows("seq_mask_tis", [1.001, 0.9995, 9.0, 1.01, 1.0, 0.99])
    assert weights(found) == [1.001, 0.9995, 0.0, 0.0, 0.0, 0.0]
    assert (found.weighs, found.gates) == ("ratio", "row")
    assert weights(of_rows("seq_mask_tis", [1.001, 0.9995, 9.0, 1.01, 1.0, 0.99], low=0.98, high=1.006))[3:] == [1.01, 1.0, 0.99]


def test_sequence_trust_region_takes_the_mean_divergence_of_a_row() -> None:
    """KL(q, p) of a token that moved is 0.0141 and |q - p| 0.009; in the first row one of two moved, in the second both."""
    moved, still = math.log(0.999), math.log(0.99)
    old = torch.tensor([moved, still, moved, moved, moved, still], dtype=torch.float64)
    rollout = torch.full((6,), still, dtype=torch.float64)
    for divergence, high, rows in (
        ("binary_kl", 0.006, [0, 0, 1]),
        ("binary_kl", 0.008, [1, 0, 1]),
        ("binary_kl", 0.015, [1, 1, 1]),
        ("tv", 0.004, [0, 0, 1]),
        ("tv", 0.005, [1, 0, 1]),
        ("tv", 0.0091, [1, 1, 1]),
    ):
        found = corrections.sequence_trust_region(old, rollout, MASK, LENGTHS, divergence=divergence, high=high)  # type: ignore[arg-type]
        ratio = math.exp(moved - still)
        want = [ratio * rows[0], rows[0], 0, ratio * rows[1], ratio * rows[1], rows[2]]
        assert found.column.tolist() == pytest.approx(want)
        assert (found.weighs, found.gates) == ("ratio", "row")
        assert filtered(found) == (3 - sum(rows), 3.0)


def test_off_policy_sequence_mask_drops_failures_that_the_policy_has_left() -> None:
    log_ratios = torch.tensor([-0.3, 0.1, 9.0, -0.05, -0.05, 0.5], dtype=torch.float64)  # mean_t (b - o): 0.1, 0.05, -0.5
    rollout = torch.full((6,), -1.0, dtype=torch.float64)
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, 0.0, -1.0])
    for delta, kept, rows in ((0.07, [0, 1, 0, 1, 1, 1], 1), (0.04, [0, 1, 0, 0, 1, 1], 2), (0.2, [1, 1, 0, 1, 1, 1], 0)):
        found = corrections.off_policy_sequence_mask(rollout + log_ratios, rollout, advantages, MASK, LENGTHS, delta=delta)
        assert found.column.tolist() == kept
        assert (found.weighs, found.gates) == ("not", "row")
        assert filtered(found) == (rows, 3.0)
    same = corrections.off_policy_sequence_mask(rollout, rollout, advantages, MASK, LENGTHS, delta=0.0)
    assert torch.equal(same.kept, MASK)


# ----------------------------------------------------------------------------------------- rejection sampling


@pytest.mark.parametrize(
    ("mode", "threshold", "kept"),
    [
        ("token_k1", "0.6_1.3", [1, 1, 0, 1, 0, 1]),  # exp(k1) is 1 / rho: 1, 0.667, 1.25, 2, 1
        ("token_k1", "0.7_1.3", [1, 0, 0, 1, 0, 1]),
        ("token_k1", "0.6_2.1", [1, 1, 0, 1, 1, 1]),
        ("token_k1", "1.3", [1, 0, 0, 1, 0, 1]),
        ("token_k1", "1.6", [1, 1, 0, 1, 0, 1]),
        ("token_k2", "0.1", [1, 1, 0, 1, 0, 1]),  # log^2 / 2: 0, 0.0822, 0.0249, 0.2402, 0
        ("token_k2", "0.05", [1, 0, 0, 1, 0, 1]),
        ("token_k3", "0.1", [1, 1, 0, 1, 0, 1]),  # rho - 1 - log rho: 0, 0.0945, 0.0231, 0.1931, 0
        ("token_k3", "0.05", [1, 0, 0, 1, 0, 1]),
        ("seq_sum_k1", "0.6_2.4", [1, 1, 0, 0, 0, 1]),  # 0.667, 2.5, 1
        ("seq_sum_k1", "0.6_2.6", [1, 1, 0, 1, 1, 1]),
        ("seq_mean_k1", "0.8_1.5", [1, 1, 0, 0, 0, 1]),  # 0.8165, 1.581, 1
        ("seq_mean_k1", "0.85_1.6", [0, 0, 0, 1, 1, 1]),
        ("seq_sum_k3", "0.2", [1, 1, 0, 0, 0, 1]),  # 0.0945, 0.2162
        ("seq_sum_k3", "0.09", [0, 0, 0, 0, 0, 1]),
        ("seq_mean_k3", "0.05", [1, 1, 0, 0, 0, 1]),  # 0.0473, 0.1081
        ("seq_max_k2", "0.1", [1, 1, 0, 0, 0, 1]),
        ("seq_max_k2", "0.25", [1, 1, 0, 1, 1, 1]),  # a sum would be 0.265
        (" seq_mean_k3 , token_k1", "0.05, 1.3", [1, 0, 0, 0, 0, 1]),
    ],
)
def test_rejection_sampling_by_hand(mode: str, threshold: str, kept: list[int]) -> None:
    found = of_rows("rejection_sampling", mode=mode, threshold=threshold)
    assert found.column.tolist() == kept
    assert (found.weighs, found.gates) == ("not", "token" if "token" in mode else "row")
    rows = [sum(kept[:3]), sum(kept[3:5]), kept[5]]
    touched = sum(have < had for have, had in zip(rows, (2, 2, 1), strict=True))
    assert filtered(found) == (5 - sum(kept), 5.0)
    assert filtered(found, "correction_filtered_rows") == (touched, 3.0)


def test_bounds_of_rejection_sampling_are_inside() -> None:
    same = of_rows("rejection_sampling", [1.0] * 6, mode="token_k1,token_k2,token_k3", threshold="1.0_1.0,0,0")
    assert torch.equal(same.kept, MASK)
    one_row = corrections.rejection_sampling(*columns([1.0, 9.0]), torch.tensor([True, False]), torch.tensor([1, 1]))
    assert filtered(one_row, "correction_filtered_rows") == (0.0, 1.0)


@pytest.mark.parametrize(
    ("mode", "threshold", "says"),
    [
        ("token_k1,token_k2", "2.0", "2 tests"),
        ("token_k4", "2.0", "unknown test"),
        ("row_k1", "2.0", "unknown test"),
        ("seq_max_k1", "2.0", "no meaning"),
        ("token_k2", "0.1_0.2", "upper bound only"),
        ("token_k1", "2.0_0.5", "0 < low <= high"),
        ("token_k1", "0_0.5", "0 < low <= high"),
        ("token_k1", "0.5", "0 < low <= high"),
    ],
)
def test_tests_that_make_no_sense(mode: str, threshold: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        of_rows("rejection_sampling", mode=mode, threshold=threshold)


def test_rejection_sampling_clamps_the_log_ratio() -> None:
    assert of_rows("rejection_sampling", [1e30] * 6, mode="token_k2", threshold="200").kept[0]
    assert not of_rows("rejection_sampling", [1e30] * 6, mode="token_k2", threshold="199.9").kept[0]


# --------------------------------------------------------------------------------------------------- together


def test_combine_keeps_what_all_keep_and_weighs_once() -> None:
    gate = of_rows("sequence_mask", ratio="product", low=0.5, high=1.6)
    pop, tis = of_tokens("icepop", low=0.6, high=1.2), of_tokens("token_tis", high=1.2)
    assert weights(combine([gate, pop])) == weights(combine([pop, gate])) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert weights(combine([gate, tis])) == [1.0, 1.2, 0.0, 0.0, 0.0, 1.0]
    assert weights(combine([pop, pop, gate])) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert weights(combine([gate])) == gate.column.tolist()
    kinds = [(each.weighs, each.gates) for each in (combine([gate, pop]), combine([gate, tis]), combine([tis]), combine([gate]))]
    assert kinds == [("ratio", "token"), ("own", "row"), ("own", "nothing"), ("not", "row")]
    assert filtered(combine([gate, tis])) == (1.0, 3.0)
    for two in ([tis, tis], [tis, pop], [pop, tis]):
        with pytest.raises(ValueError, match="different ways"):
            combine(two)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *((name, {"low": -0.1}) for name in ("token_tis", "icepop")),
        *((name, {"low": 2.0, "high": 1.0}) for name in ("token_tis", "icepop")),
        *((name, {"high": 0.0}) for name in ("token_tis", "icepop", "kpop", "token_trust_region")),
        ("m2po", {"m2_threshold": 0.0}),
    ],
)
def test_bounds_of_tokens_that_make_no_sense(name: str, params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"low must|positive"):
        of_tokens(name, **params)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *((name, {"low": -0.1}) for name in ("seq_tis", "sequence_mask", "seq_mask_tis")),
        *((name, {"low": 2.0, "high": 1.0}) for name in ("seq_tis", "sequence_mask", "seq_mask_tis")),
        *((name, {"low": 0.0, "high": 0.0}) for name in ("seq_tis", "sequence_mask", "sequence_trust_region")[:2]),
        ("sequence_trust_region", {"high": 0.0}),
    ],
)
def test_bounds_of_rows_that_make_no_sense(name: str, params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"low must|positive"):
        of_rows(name, **params)


def test_bounds_at_the_edge_are_allowed() -> None:
    assert weights(of_tokens("token_tis", low=0.0)) == [1.0, 1.5, 0.0, 0.8, 0.5, 1.0]
    assert weights(of_tokens("token_tis", low=0.7, high=0.7)) == [0.7, 0.7, 0.0, 0.7, 0.7, 0.7]
    assert weights(of_tokens("token_tis", high=0.5)) == [0.5, 0.5, 0.0, 0.5, 0.5, 0.5]
    assert weights(of_tokens("kpop", [1.0] * 6, high=0.01)) == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="ratio of the row"):
        of_rows("sequence_mask", ratio="outlier", weight="row")


def test_which_treat_a_row_as_one() -> None:
    whole = ("seq_tis", "sequence_mask", "seq_mask_tis", "sequence_trust_region", "off_policy_sequence_mask")
    single = ("token_tis", "icepop", "kpop", "token_trust_region", "m2po", "rejection_sampling")
    assert {scope_of(getattr(corrections, name)) for name in whole} == {"row"}
    assert {scope_of(getattr(corrections, name)) for name in single} == {"token"}


# ------------------------------------------------------------------------------------------ edges and precision


def test_one_token_has_the_mean_weight() -> None:
    found = corrections.token_tis(*columns([1.5, 9.0]), torch.tensor([True, False]), normalize=True)
    assert found.column.tolist() == [1.0, 0.0]


def test_a_divergence_on_its_bound_is_inside() -> None:
    old, rollout = torch.tensor([0.999]).double().log(), torch.tensor([0.99]).double().log()
    one, length = torch.tensor([True]), torch.tensor([1])
    for first, second in ((old, rollout), (rollout, old)):
        high = max(binary_kl(first, second).item(), binary_kl(second, first).item())
        assert corrections.kpop(first, second, one, high=high).kept.all()
        seen = binary_kl(second, first).item()
        assert corrections.token_trust_region(first, second, one, high=seen).kept.all()
        assert corrections.sequence_trust_region(first, second, one, length, high=seen).kept.all()


def test_rows_without_a_counted_token_are_neither_dropped_nor_kept() -> None:
    mask, lengths = torch.tensor([True, False]), torch.tensor([1, 1])
    found = corrections.sequence_mask(*columns([9.0, 9.0]), mask, lengths)
    assert filtered(found) == (1.0, 1.0)


def test_bounds_are_compared_in_float64() -> None:
    """In float32, 1.3 is a little less and 0.6 a little more."""
    ratios = [1 / 1.3, 1 / 0.6]
    logs = torch.tensor([math.log(1.3), math.log(0.6)], dtype=torch.float64)
    assert [1 / ratio for ratio in ratios] == pytest.approx([1.3, 0.6])
    found = corrections.rejection_sampling(
        -logs, torch.zeros_like(logs), torch.tensor([True, True]), torch.tensor([2]), mode="token_k1", threshold="0.6_1.3"
    )
    assert found.kept.tolist() == [True, True]


def test_probabilities_are_compared_in_float64() -> None:
    """exp(-1e-9) is 1 in float32."""
    for old, rollout in ((0.0, -1e-9), (-1e-9, 0.0)):
        columns = torch.tensor([old]), torch.tensor([rollout])
        for high, kept in ((2e-9, True), (5e-10, False)):
            found = corrections.token_trust_region(*columns, torch.tensor([True]), divergence="tv", high=high)
            assert bool(found.kept) is kept


def test_squares_are_taken_in_float64() -> None:
    """The square of 0.2 rounds up to its own bound in float32; the mean must be below, and in float64 it is."""
    log_ratios = torch.full((2,), 0.2)
    bound = (log_ratios**2)[0].item()
    assert bound > log_ratios[0].item() ** 2
    found = corrections.m2po(log_ratios, torch.zeros(2), torch.tensor([True, True]), m2_threshold=bound)
    assert found.kept.tolist() == [True, True]


def test_low_precision_is_widened_before_the_difference() -> None:
    """-8 + 2^-7 takes more digits than bfloat16 has."""
    old, rollout = torch.tensor([-8.0]).bfloat16(), torch.tensor([-(2.0**-7)]).bfloat16()
    found = corrections.icepop(old, rollout, torch.tensor([True]), low=0.0)
    assert found.weights.item() == pytest.approx(math.exp(-8 + 2**-7), rel=1e-6)
