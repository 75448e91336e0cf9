from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.algos import policy_losses
from tandem.algos.composition import loss_sum
from tandem.algos.extra_terms import kl_term
from tandem.algos.policy_losses import importance_weighted, ppo_clip
from tandem.algos.supervised import negative_log_likelihood
from tandem.algos.terms import LossInputs
from tandem.errors import ColumnError

COLUMNS = ("old_logprobs", "advantages")
ppo_with_kl = loss_sum(ppo_clip, kl_term)


def inputs(ratio: list[float], advantages: list[float], mask: list[bool] | None = None, **columns: Tensor) -> LossInputs:
    logprobs = torch.tensor(ratio).log().requires_grad_()
    counted = torch.tensor(mask or [True] * len(ratio))
    given = {"old_logprobs": torch.zeros(len(ratio)), "advantages": torch.tensor(advantages)}
    return LossInputs(logprobs, counted, torch.tensor([len(ratio)]), given | columns)


def gradient(given: LossInputs, loss: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss.sum(), given.logprobs)
    return found.tolist()


def test_the_clip_stops_gains_beyond_it_and_never_losses() -> None:
    given = inputs([1.5, 1.5, 0.5, 0.5, 1.0], [1.0, -1.0, 1.0, -1.0, 2.0])
    result = ppo_clip(given, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(result.loss, torch.tensor([-1.3, 1.5, -0.5, 0.8, -2.0]))
    assert gradient(given, result.loss) == pytest.approx([0, 1.5, -0.5, 0, -2])
    metrics = result.metrics.values_by_name()
    assert metrics["clip_fraction"] == pytest.approx(2 / 5)
    assert metrics["ratio"] == pytest.approx(1.0)
    assert metrics["ratio_max"] == pytest.approx(1.5)


def test_dual_clip_bounds_losses_of_negative_advantages_only() -> None:
    given = inputs([10.0, 10.0, 2.0], [-1.0, 1.0, -1.0])
    result = ppo_clip(given, dual_clip=3.0)
    torch.testing.assert_close(result.loss, torch.tensor([3.0, -1.2, 2.0]))
    assert gradient(given, result.loss) == pytest.approx([0, 0, 2])
    assert result.metrics["dual_clip_fraction"].value == pytest.approx(1 / 3)


def test_a_loss_on_its_dual_bound_is_not_bounded() -> None:
    assert ppo_clip(inputs([3.0, 2.0], [-1.0, 0.0]), dual_clip=3.0).metrics["dual_clip_fraction"].value == 0


def test_the_ratio_of_a_bad_token_is_capped() -> None:
    given = inputs([10.0, 10.0, 2.0, 0.1], [-1.0, 1.0, -1.0, -1.0])
    result = ppo_clip(given, ratio_cap=3.0)
    torch.testing.assert_close(result.loss, torch.tensor([3.0, -1.2, 2.0, 0.8]))
    assert gradient(given, result.loss) == pytest.approx([0, 0, 2, 0])


def test_the_log_ratio_is_clamped_before_exp() -> None:
    given = inputs([math.exp(50), math.exp(3)], [-1.0, -1.0])
    loose, tight = ppo_clip(given), ppo_clip(given, log_ratio_clamp=2.0)
    assert loose.loss.tolist() == pytest.approx([math.exp(20), math.exp(3)], rel=1e-5)
    assert gradient(given, loose.loss)[0] == 0
    assert tight.loss.tolist() == pytest.approx([math.exp(2)] * 2, rel=1e-5)
    assert ppo_clip(given, log_ratio_clamp=None).loss[0] > 1e21


def test_masked_entries_reach_neither_loss_nor_gradient_nor_metrics() -> None:
    mask = [True, False, False, True]
    clean = inputs([1.1, 1.0, 1.0, 0.7], [1.0, 0.0, 0.0, -2.0], mask, ref_logprobs=torch.zeros(4))
    dirty = inputs(
        [1.1, math.nan, math.inf, 0.7],
        [1.0, math.inf, math.nan, -2.0],
        mask,
        ref_logprobs=torch.tensor([0, math.nan, -math.inf, 0]),
    )
    results = [ppo_with_kl(each, dual_clip=3.0, kl_coef=0.5) for each in (clean, dirty)]
    assert torch.equal(results[0].loss, results[1].loss)
    assert results[1].loss[1:3].tolist() == [0, 0]
    assert gradient(clean, results[0].loss) == gradient(dirty, results[1].loss)
    assert results[0].metrics.values_by_name() == results[1].metrics.values_by_name()


def test_the_kl_term_stands_beside_the_policys() -> None:
    given = inputs([1.0, 1.0], [1.0, 1.0], ref_logprobs=torch.tensor([0.5, 0.0]))
    assert ppo_clip(given).terms.keys() == {"policy"}
    result = ppo_with_kl(given, kl_coef=0.1, kl_estimator="k2")
    torch.testing.assert_close(result.terms["kl"], torch.tensor([0.1 * 0.125, 0.0]))
    torch.testing.assert_close(result.loss, torch.tensor([-1 + 0.0125, -1.0]))
    assert result.metrics["kl_ref"].value == pytest.approx(0.0625)
    with pytest.raises(ColumnError, match="ref_logprobs"):
        ppo_with_kl(inputs([1.0], [1.0]), kl_coef=0.1)


def test_low_precision_is_widened_before_differences() -> None:
    given = inputs([1.0], [1.0], old_logprobs=torch.tensor([-0.001], dtype=torch.bfloat16))
    assert ppo_clip(given).loss.dtype == torch.float32
    double = LossInputs(given.logprobs.double(), given.mask, given.lengths, given.columns)
    assert ppo_clip(double).loss.dtype == torch.float64


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_low": 1.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 1.0}, "above 1"),
        ({"log_ratio_clamp": 0.0}, "log_ratio_clamp"),
        ({"kl_coef": -0.1}, "away from the reference"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "does not work inside a loss"),
    ],
)
def test_parameters_out_of_range(params: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ppo_with_kl(inputs([1.0], [1.0], ref_logprobs=torch.zeros(1)), **params)  # type: ignore[arg-type]


def test_supervised_loss_is_the_negative_logprob_of_counted_tokens() -> None:
    given = inputs([0.5, 0.25, math.nan], [0.0, 0.0, 0.0], [True, True, False])
    result = negative_log_likelihood(given)
    torch.testing.assert_close(result.loss, torch.tensor([math.log(2), math.log(4), 0.0]))
    assert gradient(given, result.loss) == [-1, -1, 0]
    assert result.metrics["nll"].value == pytest.approx(1.5 * math.log(2))
    assert result.metrics["nll"].count == 2


METRICS: list[tuple[str, dict[str, float], dict[str, float]]] = [
    # ratios 1.5, 0.5, 1 and 2; advantages 1, -1, 0 and -2
    ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, {"clip_fraction": 0.5}),
    ("ppo_clip", {"clip_low": 0.5, "clip_high": 0.5}, {"clip_fraction": 0.0}),
    ("importance_weighted", {}, {}),
    ("truncated_reinforce", {"ratio_low": 0.5, "ratio_high": 1.5}, {"clip_fraction": 0.25}),
    ("tapered_reinforce", {}, {"clip_fraction": 0.75}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.2}, {"clip_fraction": 0.75}),
    ("sapo", {}, {}),
    ("mirror_descent", {}, {}),
    ("dppo_tv", {"clip_low": 0.1, "clip_high": 0.1}, {"clip_fraction": 0.5}),
    ("dppo_kl", {"clip_low": 0.07, "clip_high": 0.04}, {"clip_fraction": 0.5}),
    ("kl_cov", {}, {"abs_log_ratio": (math.log(1.5) + 2 * math.log(2)) / 4}),
    ("clip_cov", {"clip_low": 0.2, "clip_high": 0.2}, {"clip_fraction": 0.75}),
]


@pytest.mark.parametrize(("name", "params", "own"), METRICS)
def test_what_is_reported_of_a_batch(name: str, params: dict[str, float], own: dict[str, float]) -> None:
    """Tokens: good and clipped, bad and clipped, neutral, bad and not clipped; then one that is masked."""
    old = torch.full((5,), 0.3).log()
    given = inputs(
        [0.45, 0.15, 0.3, 0.6, 0.9],
        [1.0, -1.0, 0.0, -2.0, 5.0],
        [True] * 4 + [False],
        old_logprobs=old,
        rewards=torch.tensor([1.0]),
        most_covariant=torch.tensor([1, 0, 0, 0, 1]),
        random_covariant=torch.tensor([0, 0, 1, 0, 1]),
    )
    if name == "tapered_reinforce":
        given = LossInputs(given.logprobs, given.mask, torch.tensor([3, 2]), {**given.columns, "rewards": torch.tensor([1.0, 0.0])})
    found = getattr(policy_losses, name)(given, **params).metrics
    want = {"ratio": 5 / 4, "ratio_max": 2.0, "kl_old_new": -(math.log(1.5) + math.log(0.5) + math.log(2)) / 4, **own}
    assert found.values_by_name() == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert found["ratio"].count == 4


def test_the_largest_ratio_is_one_of_a_token_that_counts() -> None:
    found = importance_weighted(inputs([0.5, 9.0, 0.25], [1.0, 1.0, 1.0], [True, False, True])).metrics["ratio_max"]
    assert (found.value, found.reduction) == (pytest.approx(0.5), "max")


def test_no_metric_of_a_batch_without_tokens_fails() -> None:
    none = LossInputs(
        torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), dict.fromkeys(COLUMNS, torch.zeros(0))
    )
    assert importance_weighted(none).metrics["ratio_max"].value == 0.0


def test_entropy_is_reported_where_the_engine_gives_it() -> None:
    base = inputs([1.0, 1.0], [0.0, 0.0], [True, False])
    given = LossInputs(base.logprobs, base.mask, base.lengths, base.columns, entropy=torch.tensor([0.75, 9.0]))
    for loss in (ppo_clip, negative_log_likelihood):
        assert loss(given).metrics["entropy"].value == 0.75
        assert "entropy" not in loss(base).metrics


def test_the_log_ratio_is_clamped_from_below_too() -> None:
    given = inputs([math.exp(-50), math.exp(-3)], [1.0, 1.0])
    assert importance_weighted(given).loss.tolist() == pytest.approx([-math.exp(-20), -math.exp(-3)], rel=1e-5)


def test_soft_gates_are_narrower_or_wider_in_the_precision_of_the_ratio() -> None:
    base = inputs([1.5, 0.5], [1.0, -1.0])
    columns = {name: column.double() for name, column in base.columns.items()}
    given = LossInputs(torch.tensor([1.5, 0.5]).double().log(), base.mask, base.lengths, columns)
    found = policy_losses.sapo(given, tau_pos=0.7, tau_neg=0.1).loss.tolist()
    assert found == pytest.approx([-4 / 0.7 / (1 + math.exp(-0.35)), 4 / 0.1 / (1 + math.exp(0.05))], rel=1e-12)


def test_what_failed_is_tapered_below_one_too() -> None:
    base = inputs([0.5, 0.5], [2.0, 2.0], rewards=torch.tensor([0.0, 1.0]))
    given = LossInputs(base.logprobs, base.mask, torch.tensor([1, 1]), base.columns)
    x = math.log(0.5)
    assert policy_losses.tapered_reinforce(given).loss.tolist() == pytest.approx([-0.5 * 2 * x, -2 * x])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_gate_opens_on_its_bound_and_caps_the_ratio(name: str) -> None:
    """P = 0.6 and 0.1 from q = 0.2: both steps are large. The first leads away where A > 0, the second elsewhere."""
    loss = getattr(policy_losses, name)
    p, q = torch.tensor([0.6, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.2], dtype=torch.float64)
    if name == "dppo_tv":
        sizes = [(p.log().exp() - q.log().exp())[0].item(), -(p.log().exp() - q.log().exp())[1].item()]
    else:
        sizes = (q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()).tolist()

    def run(advantages: list[float], high: float, low: float, **params: Any) -> tuple[list[float], list[float], float]:
        x = p.log().requires_grad_()
        columns = {"old_logprobs": q.log(), "advantages": torch.tensor(advantages, dtype=torch.float64)}
        given = LossInputs(x, torch.tensor([True, True]), torch.tensor([2]), columns)
        found = loss(given, clip_high=high, clip_low=low, **params)
        return found.loss.tolist(), gradient(given, found.loss), found.metrics["clip_fraction"].value

    wide, narrow = [1.001 * size for size in sizes], [0.999 * size for size in sizes]
    x = p.log().tolist()
    ratios = [3.0, 0.5]
    value, slope, closed = run([1.0, -2.0], wide[0], wide[1])
    assert value == pytest.approx([-3 * x[0], 2 * 0.5 * x[1]])
    assert (slope, closed) == (pytest.approx([-3.0, 1.0]), 0)
    assert run([1.0, -2.0], narrow[0], narrow[1]) == ([0, 0], [0, 0], 1)
    assert run([-1.0, 2.0], 0.0, 0.0)[1:] == (pytest.approx([3.0, -1.0]), 0)  # both lead back
    assert run([0.0, 0.0], wide[0], narrow[1])[2] == 0.5  # an advantage of 0 is not above 0
    assert run([1.0, -2.0], wide[0], wide[1], ratio_cap=2.0)[1] == pytest.approx([-2.0, 1.0])
    of_ratio = run([1.0, -2.0], wide[0], wide[1], surrogate="ratio")
    assert (of_ratio[0], of_ratio[1]) == (pytest.approx([-ratios[0], 2 * ratios[1]]), pytest.approx([-3.0, 1.0]))
    capped = run([1.0, -2.0], wide[0], wide[1], surrogate="ratio", ratio_cap=2.0)
    assert (capped[0], capped[1]) == (pytest.approx([-2.0, 1.0]), pytest.approx([0.0, 1.0]))
    clamped = run([1.0, -2.0], wide[0], wide[1], log_ratio_clamp=0.1)
    assert clamped[1] == pytest.approx([-math.exp(0.1), 2 * math.exp(-0.1)])
    if name == "dppo_tv":
        assert run([1.0, -2.0], sizes[0], sizes[1])[2] == 0
        assert run([-1.0, 2.0], narrow[0], wide[1], sides="both")[2] == 0.5
        assert run([-1.0, 2.0], wide[0], narrow[1], sides="both")[2] == 0.5


@pytest.mark.parametrize(("bound", "advantage", "x", "o"), [("clip_high", 1.0, 0.0, -0.5), ("clip_low", -1.0, -0.5, 0.0)])
def test_a_token_on_the_bound_of_the_gate_is_near(bound: str, advantage: float, x: float, o: float) -> None:
    x_N, o_N, advantages = (torch.tensor([value], dtype=torch.float64) for value in (x, o, advantage))
    not_p, not_q = -x_N.expm1(), -o_N.expm1()
    size = float((1 - not_q) * (o_N - x_N) + not_q * ((not_q + 1e-8) / (not_p + 1e-8)).log())
    given = LossInputs(x_N, torch.tensor([True]), torch.tensor([1]), {"old_logprobs": o_N, "advantages": advantages})
    for value, closed in ((size, 0), (math.nextafter(size, 0), 1)):
        found = policy_losses.dppo_kl(given, **{"clip_low": 0.0, "clip_high": 0.0, bound: value})
        assert found.metrics["clip_fraction"].value == closed


def test_what_is_left_beside_a_certain_token_has_a_floor_too() -> None:
    """Of q = 1 - 1e-8, so that 1e-8 more or less beside 1 - q changes the divergence in the ninth place."""
    old, x = math.log1p(-1e-8), math.log(0.5)
    size = (1 - 1e-8) * (old - x) + 1e-8 * math.log(2e-8 / (0.5 + 1e-8))
    columns = {name: torch.tensor([each], dtype=torch.float64) for name, each in (("old_logprobs", old), ("advantages", -1.0))}
    given = LossInputs(torch.tensor([x], dtype=torch.float64), torch.tensor([True]), torch.tensor([1]), columns)
    for bound, closed in ((size - 1e-9, 1), (size + 1e-9, 0)):
        assert policy_losses.dppo_kl(given, clip_low=bound, clip_high=0.0).metrics["clip_fraction"].value == closed


@pytest.mark.parametrize(("p", "q"), [(0.6, 0.2), (1 - 1e-9, 0.5), (0.5, 1 - 1e-9)])
def test_the_divergence_of_the_gate(p: float, q: float) -> None:
    """KL(q, p) with 1e-8 beside what is left, so that a certain token has a finite one; known to 1e-9 of itself."""
    size = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    away = 1.0 if p > q else -1.0
    x, old, advantages = (torch.tensor([value], dtype=torch.float64) for value in (math.log(p), math.log(q), away))
    given = LossInputs(x, torch.tensor([True]), torch.tensor([1]), {"old_logprobs": old, "advantages": advantages})
    for bound, closed in ((size * (1 - 1e-7), 1), (size * (1 + 1e-7), 0)):
        found = policy_losses.dppo_kl(given, clip_low=bound, clip_high=bound)
        assert found.metrics["clip_fraction"].value == closed


def test_covariant_tokens_are_held_or_left_out() -> None:
    given = inputs(
        [2.0, 2.0, 0.5], [1.0, 1.0, -1.0], most_covariant=torch.tensor([1, 0, 1]), random_covariant=torch.tensor([1, 0, 0])
    )
    held = policy_losses.kl_cov(given, cov_kl_coef=0.5)
    log = math.log(2)
    assert held.loss.tolist() == pytest.approx([-2 + 0.5 * log, -2, 0.5 + 0.5 * log])
    assert gradient(given, held.loss) == pytest.approx([-2 + 0.5, -2, 0.5 - 0.5])
    left = policy_losses.clip_cov(given, clip_low=0.2, clip_high=0.3)
    assert left.loss.tolist() == pytest.approx([0, -1.3, 0.8])
    assert left.metrics["clip_fraction"].value == 1
    wide = policy_losses.clip_cov(given, clip_low=1.0, clip_high=9.0)
    assert gradient(given, wide.loss) == pytest.approx([0, -2, 0.5])
    assert wide.metrics["clip_fraction"].value == pytest.approx(1 / 3)


def test_soft_gates_and_mirror_descent_by_hand() -> None:
    given = inputs([1.5, 0.5, 2.0], [2.0, -1.0, 0.0])
    soft = policy_losses.sapo(given, tau_pos=2.0, tau_neg=4.0)

    def gate(tau: float, ratio: float) -> float:
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    assert soft.loss.tolist() == pytest.approx([-2 * gate(2, 1.5), gate(4, 0.5), 0.0])
    mirror = policy_losses.mirror_descent(given, dro_beta=0.5)
    logs = [math.log(1.5), math.log(0.5), math.log(2)]
    assert mirror.loss.tolist() == pytest.approx([-2 * logs[0] + logs[0] ** 2 / 4, logs[1] + logs[1] ** 2 / 4, logs[2] ** 2 / 4])
    clipped = policy_losses.truncated_reinforce(given, ratio_low=0.75, ratio_high=1.25)
    assert clipped.loss.tolist() == pytest.approx([-1.25 * 2 * logs[0], 0.75 * logs[1], 0.0])
    assert gradient(given, clipped.loss) == pytest.approx([-2.5, 0.75, 0.0])
    important = policy_losses.cispo(given, clip_low=0.25, clip_high=0.25)
    assert gradient(given, important.loss) == pytest.approx([-2.5, 0.75, 0.0])
