"""What holds for every row of the table and every correction: garbage under the mask, order, splits, precision, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.algos.aggregation import aggregate
from tandem.algos.columns import credit, credit_gives, derive, derived_columns, loss_ref, step_columns
from tandem.algos.corrections import combine, token_tis
from tandem.algos.functions import CORRECTIONS, loss_function
from tandem.algos.table import ALGORITHMS, configure
from tandem.algos.terms import LossInputs, keep
from tandem.errors import ConfigError
from tandem.types import Algorithm

REQUIRED: dict[str, dict[str, Any]] = {"dr_grpo": {"length_constant": 8.0}}
POLICY = [name for name, row in ALGORITHMS.items() if row.advantage is not None]
LENGTHS = torch.tensor([5, 3, 6, 2, 4, 5])
GROUPS = torch.tensor([3, 9, 3, 9, 3, 9])

Rows = dict[str, Tensor]


def algorithm(name: str, **params: Any) -> Algorithm:
    return configure(name, {**REQUIRED.get(name, {}), **params})


def make_rows(dtype: torch.dtype = torch.float64) -> Rows:
    """Six rows in two groups, a hole in some of them, every column that some algorithm reads."""
    seeded = torch.Generator().manual_seed(3)
    total = int(LENGTHS.sum())

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(total, generator=seeded, dtype=torch.float64)

    mask = torch.rand(total, generator=seeded) > 0.3
    mask[LENGTHS.cumsum(0) - 1] = True
    rollout = -torch.rand(total, generator=seeded, dtype=torch.float64) - 0.1
    old = rollout + normal(0.05)
    tokens = {
        "rollout_logprobs": rollout,
        "old_logprobs": old,
        "logprobs": old + normal(0.1),
        "ref_logprobs": old + normal(0.3),
        "teacher_logprobs": old + normal(0.3),
        "values": normal(1),
        "process_rewards": normal(1),
        "sum_pi_squared": torch.rand(total, generator=seeded, dtype=torch.float64),
        "uniforms": torch.rand(total, generator=seeded, dtype=torch.float64),
    }
    rows = {"rewards": torch.tensor([1.0, 0, 0.5, 1, 0, 0.25]), "reward_baselines": torch.full((6,), 0.5)}
    made: Rows = {**tokens, **rows, "reward_components": torch.rand(6, 2, generator=seeded, dtype=torch.float64)}
    return {
        **{name: column.to(dtype) for name, column in made.items()},
        "mask": mask,
        "lengths": LENGTHS,
        "groups": GROUPS,
        "temperature": torch.ones(6),
        "tokens": torch.zeros(total),
    }


def with_columns(chosen: Algorithm, rows: Rows) -> Rows:
    """What the pipeline makes of a batch before its update."""
    columns = derived_columns(chosen)
    for name in [name for name in columns if name == "token_rewards"]:
        rows = {**rows, name: derive(chosen, name, rows)[0]}
    counts = torch.tensor([int(part.sum()) for part in rows["mask"].split(rows["lengths"].tolist())])
    rows = {**rows, **credit(chosen, rows, {**rows, "token_counts": counts}, torch.arange(len(rows["lengths"])))}
    for name in columns.keys() - {"token_rewards"}:
        rows = {**rows, name: derive(chosen, name, rows)[0]}
    return {**rows, **step_columns(chosen, rows)}


def gradient(chosen: Algorithm, rows: Rows) -> tuple[float, Tensor]:
    loss = loss_ref(chosen)
    logprobs = rows["logprobs"].clone().requires_grad_()
    columns = {name: rows[name] for name in rows if name != "correction" or "correction" in chosen.needs}
    result = loss_function(loss.name)(LossInputs(logprobs, rows["mask"], rows["lengths"], columns), **loss.params)
    total = aggregate(result.loss, rows["loss_weights"], rows["mask"])
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad


def is_token_level(column: Tensor) -> bool:
    return column.dim() == 1 and len(column) == int(LENGTHS.sum())


def select(rows: Rows, chosen: list[int]) -> Rows:
    """These rows, in this order."""
    splits = {
        name: (column.split(LENGTHS.tolist()) if is_token_level(column) else column.unbind(0)) for name, column in rows.items()
    }
    return {
        name: torch.cat([parts[i] for i in chosen]) if is_token_level(rows[name]) else torch.stack([parts[i] for i in chosen])
        for name, parts in splits.items()
    }


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", POLICY)
def test_garbage_under_the_mask_reaches_nothing(name: str, garbage: float) -> None:
    chosen, clean = algorithm(name), make_rows()
    dirty = {
        column: torch.where(clean["mask"], values, garbage) if is_token_level(values) and values.is_floating_point() else values
        for column, values in clean.items()
    }
    loss, found = gradient(chosen, with_columns(chosen, clean))
    same_loss, same = gradient(chosen, with_columns(chosen, dirty))
    assert same_loss == loss
    assert torch.equal(same, found)
    assert not bool(found[~clean["mask"]].any())


@pytest.mark.parametrize("name", POLICY)
def test_the_order_of_rows_changes_nothing(name: str) -> None:
    chosen, rows, order = algorithm(name), make_rows(), [4, 1, 5, 0, 3, 2]
    loss, found = gradient(chosen, with_columns(chosen, rows))
    other_loss, other = gradient(chosen, with_columns(chosen, select(rows, order)))
    assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-9)
    straight = select({"gradient": found}, order)["gradient"]
    torch.testing.assert_close(other, straight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", POLICY)
def test_micro_batches_of_whole_rows_add_up(name: str) -> None:
    chosen = algorithm(name)
    rows = with_columns(chosen, make_rows())
    loss, found = gradient(chosen, rows)
    parts = [[0], [1, 2, 3], [4, 5]]
    split = [gradient(chosen, select(rows, part)) for part in parts]
    assert sum(part for part, _ in split) == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(torch.cat([part for _, part in split]), found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", POLICY)
def test_float32_is_close_to_float64(name: str) -> None:
    chosen = algorithm(name)
    loss, found = gradient(chosen, with_columns(chosen, make_rows()))
    other_loss, other = gradient(chosen, with_columns(chosen, make_rows(torch.float32)))
    assert other_loss == pytest.approx(loss, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(other.double(), found, rtol=1e-3, atol=1e-5)


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
    torch.testing.assert_close(found, rows["correction"] * uncorrected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_equal_logprobs_need_no_correction(correction: str) -> None:
    chosen = algorithm("grpo", correction=correction)
    rows = make_rows()
    rows["old_logprobs"] = rows["rollout_logprobs"]
    made = with_columns(chosen, rows)
    assert torch.equal(made["correction"], keep(torch.ones_like(made["correction"]), rows["mask"]))


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
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        algorithm(name, **params)


def test_a_penalty_in_the_reward_needs_the_reference() -> None:
    assert derived_columns(algorithm("reinforce_pp"))["token_rewards"] == {"rewards", "mask"}
    penalised = algorithm("reinforce_pp", reward_kl_coef=0.1)
    assert derived_columns(penalised)["token_rewards"] == {"rewards", "mask", "old_logprobs", "ref_logprobs"}
