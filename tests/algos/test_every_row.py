"""What a row, an estimator or a correction of the table does with its parameters, and what it refuses; laws are in tests/laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.algos.columns import credit_gives, derived_columns, step_columns
from tandem.algos.corrections import combine, token_tis
from tandem.algos.functions import CORRECTIONS
from tandem.errors import ConfigError
from tests.algos.batches import Layout, layout_of, make_batch
from tests.algos.pipeline import POLICY, Rows, algorithm, gradient, with_columns


def make_rows() -> Rows:
    """Six rows in two groups, with holes."""
    lengths = (5, 3, 6, 2, 4, 5)
    mask = [place % 4 != 1 or place + 1 == length for length in lengths for place in range(length)]
    return make_batch(lengths, mask=mask, groups=[3, 9, 3, 9, 3, 9], rewards=[1.0, 0, 0.5, 1, 0, 0.25], seed=3)


@pytest.mark.parametrize("name", POLICY)
def test_the_estimator_gives_what_it_says(name: str) -> None:
    chosen, rows = algorithm(name), make_rows()
    made = with_columns(chosen, rows)
    for column in credit_gives(chosen):
        assert made[column].shape == rows["mask"].shape
        assert not bool(made[column][~rows["mask"]].any())


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_joins_every_ratio(correction: str) -> None:
    chosen = algorithm("grpo", correction=correction)
    assert "correction" in chosen.needs
    rows = with_columns(chosen, make_rows())
    plain = with_columns(algorithm("grpo"), make_rows())
    _, found = gradient(chosen, rows)
    _, uncorrected = gradient(algorithm("grpo"), plain)
    torch.testing.assert_close(found, rows["correction"][:, None] * uncorrected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", POLICY)
def test_a_row_that_is_drawn_k_times_is_as_good_as_k_rows(name: str) -> None:
    """What is made of a whole batch is made before the draw; the repeated rows are trained on as if each had its own key."""
    counts = [2, 0, 1, 3, 0, 1]
    chosen, plain = algorithm(name, resampling="pow"), algorithm(name, resampling=None)
    assert "resample_counts" in chosen.needs
    drawn = {**with_columns(plain, make_rows()), "resample_counts": torch.tensor(counts, dtype=torch.float32)}
    loss, found = gradient(chosen, drawn | step_columns(chosen, drawn))
    places = layout_of(drawn).rows
    copies = Layout([place for place, count in zip(places, counts, strict=True) for _ in range(count)])
    repeated = copies.of(drawn)
    repeated_loss, each = gradient(plain, repeated | step_columns(plain, repeated))
    assert repeated_loss == pytest.approx(loss, rel=1e-6)  # weights are float32
    want = torch.zeros_like(found).index_add(0, torch.tensor(copies.tokens), each)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-9)


def test_the_denominator_is_a_choice() -> None:
    params: dict[str, Any] = {"correction": {"icepop": {"low": 0.97, "high": 1.02}}, "aggregation": "token-mean"}
    every = with_columns(algorithm("grpo", **params), make_rows())
    kept = with_columns(algorithm("grpo", **params, denominator="kept"), make_rows())
    num, num_kept = int(every["mask"].sum()), int((every["correction"] != 0).sum())
    assert 0 < num_kept < num
    assert float(every["loss_weights"].max()) == pytest.approx(1 / num)
    assert float(kept["loss_weights"].max()) == pytest.approx(1 / num_kept)


def test_corrections_combine_by_what_all_keep() -> None:
    both = algorithm("grpo", correction={"icepop": {"low": 0.97, "high": 1.02}, "m2po": {"m2_threshold": 1e-4}})
    icepop = algorithm("grpo", correction={"icepop": {"low": 0.97, "high": 1.02}})
    m2po = algorithm("grpo", correction={"m2po": {"m2_threshold": 1e-4}})
    columns = [with_columns(each, make_rows())["correction"] for each in (both, icepop, m2po)]
    assert torch.equal(columns[0], columns[1] * (columns[2] != 0))
    rows = make_rows()
    twice = token_tis(rows["old_logprobs"], rows["rollout_logprobs"], rows["mask"])
    with pytest.raises(ValueError, match="different ways"):
        combine([twice, twice])


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("gspo", {"correction": "icepop"}, "one ratio"),
        ("gmpo", {"correction": "kpop"}, "one ratio"),
        ("grpo", {"correction": {"kpop": {"low": 0.1}}}, "never too small"),
        ("grpo", {"correction": {"sequence_trust_region": {"low": 0.1}}}, "never too small"),
        ("grpo", {"correction": {"rejection_sampling": {"mode": "token_k3", "threshold": "0.1_0.2"}}}, "upper bound only"),
        ("grpo", {"correction": {"icepop": {"hihg": 2.0}}}, "did you mean high"),
        ("grpo", {"correction": {"icepop": {"low": 3.0, "high": 2.0}}}, "0 <= low <= high"),
        ("grpo", {"correction": {"token_tis": {}, "seq_tis": {}}}, "different ways"),
        ("grpo", {"denominator": "kept"}, "there is no correction"),
        ("grpo", {"bypass": True, "correction": "icepop"}, "nothing to correct"),
        ("vapo", {"length_adaptive_alpha": 0.0}, "must be positive"),
        ("ppo", {"lam": 1.5}, r"in \[0, 1\]"),
        ("kl_cov", {"cov_frac": 0.0}, r"in \(0, 1\]"),
        ("rloo", {"scale": "batch"}, "choose one"),
        ("grpo", {"resampling": "pow", "resampling_pow": 0.0}, "must be positive"),
        ("grpo", {"kl_target": 0.1}, "begin with a positive one"),
        ("grpo", {"kl_coef": 0.1, "kl_target": 0.0}, "kl_target must be positive"),
        (
            "reinforce_pp",
            {"reward_kl_coef": 0.1, "reward_kl_target": 0.1, "reward_kl_horizon": 0},
            "reward_kl_horizon must be at least 1",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        algorithm(name, **params)


def test_a_penalty_in_the_reward_needs_the_reference() -> None:
    assert derived_columns(algorithm("reinforce_pp"))["token_rewards"] == {"rewards", "mask"}
    penalised = algorithm("reinforce_pp", reward_kl_coef=0.1)
    assert derived_columns(penalised)["token_rewards"] == {"rewards", "mask", "old_logprobs", "ref_logprobs"}


def test_an_adaptive_coefficient_is_a_column() -> None:
    rows = make_rows()
    half = {"kl_coef": torch.full((6,), 0.5), "reward_kl_coef": torch.full((6,), 0.5)}
    in_loss, in_reward = {"kl_coef": 0.5}, {"reward_kl_coef": 0.5}
    for name, params, target in (("grpo", in_loss, "kl_target"), ("reinforce_pp", in_reward, "reward_kl_target")):
        fixed = algorithm(name, **params)
        adaptive = algorithm(name, **dict.fromkeys(params, 0.125), **{target: 0.1})
        loss, found = gradient(fixed, with_columns(fixed, rows))
        same_loss, same = gradient(adaptive, with_columns(adaptive, {**rows, **half}))
        assert same_loss == pytest.approx(loss, rel=1e-9)
        torch.testing.assert_close(same, found, rtol=1e-9, atol=1e-12)
    assert derived_columns(adaptive)["token_rewards"] == {"rewards", "mask", "old_logprobs", "ref_logprobs", "reward_kl_coef"}
