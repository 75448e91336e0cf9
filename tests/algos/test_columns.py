"""The columns of an update on rows small enough to do by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.algos.columns import (
    KLControl,
    advantages,
    as_mapping,
    bound,
    corrections_of,
    credit,
    credit_gives,
    credit_needs,
    derive,
    derived_columns,
    kl_controls,
    loss_ref,
    reads,
    resampling,
    step_columns,
    step_gives,
    step_needs,
    unit_of,
)
from tandem.algos.corrections import icepop, token_tis
from tandem.algos.returns import token_rewards
from tandem.algos.table import configure
from tandem.errors import ColumnError

MASK, LENGTHS = torch.tensor([True, False, True, True]), torch.tensor([3, 1])
GROUPS = torch.tensor([7, 7])


def rows(**more: Tensor) -> dict[str, Tensor]:
    return {"mask": MASK, "lengths": LENGTHS, "groups": GROUPS, "rewards": torch.tensor([1.0, 0.0]), **more}


def test_an_episodes_advantage_stands_on_all_its_rows() -> None:
    grpo = configure("grpo", {"scale": "none"})
    episodes = {"rewards": torch.tensor([0.0, 1.0]), "groups": torch.tensor([3, 3])}
    assert advantages(grpo, episodes["rewards"], episodes["groups"]).tolist() == [-0.5, 0.5]
    for of_row, want in (([1, 0], [0.5, 0, 0.5, -0.5]), ([1, 1], [0.5, 0, 0.5, 0.5])):
        found = credit(grpo, rows(), episodes, torch.tensor(of_row))
        assert {name: column.tolist() for name, column in found.items()} == {"advantages": want}


def test_what_follows_an_estimator_works_on_its_token_advantages() -> None:
    whitened = configure("reinforce_pp_baseline")
    assert whitened.advantage == "group_baseline+whiten"
    episodes = {"rewards": torch.tensor([0.0, 1.0]), "groups": torch.tensor([3, 3])}
    found = credit(whitened, rows(), episodes, torch.tensor([0, 1]))["advantages"]
    assert found.tolist() == pytest.approx([-(3**-0.5), 0, -(3**-0.5), 2 * 3**-0.5], rel=1e-5)


def test_credit_of_tokens_gives_returns_too() -> None:
    ppo = configure("ppo", {"whiten_std": False})
    values = torch.tensor([0.5, 9.0, 0.5, 1.0])
    found = credit(ppo, rows(values=values, token_rewards=torch.tensor([0.0, 0, 1, 0])), {}, torch.tensor([0, 1]))
    assert found["returns"].tolist() == [1.0, 0, 1.0, 0.0]
    assert found["advantages"].tolist() == pytest.approx([0.5, 0, 0.5, -1.0])
    assert credit_gives(ppo) == {"advantages", "returns"}
    assert credit_gives(configure("grpo")) == {"advantages"}
    assert credit_needs(ppo) == {"mask", "token_rewards", "values"}
    assert credit_needs(configure("grpo")) == {"mask", "rewards"}


def test_derived_columns_and_what_they_are_made_from() -> None:
    plain, penalised = configure("ppo"), configure("ppo", {"reward_kl_coef": 0.5})
    assert derived_columns(plain) == {"token_rewards": {"mask", "rewards"}}
    assert derived_columns(penalised) == {"token_rewards": {"mask", "rewards", "old_logprobs", "ref_logprobs"}}
    assert derived_columns(configure("sft")) == {}
    logprobs = {"old_logprobs": torch.tensor([-1.0, 9, -1, -1]), "ref_logprobs": torch.tensor([-2.0, 9, -1, -1])}
    found, metrics = derive(penalised, "token_rewards", rows(**logprobs))
    assert found.tolist() == [-0.5, 0, 1, 0]
    assert metrics.values_by_name() == {}
    corrected = configure("grpo", {"correction": {"icepop": {"low": 0.5, "high": 2.0}}})
    assert derived_columns(corrected) == {"correction": {"mask", "old_logprobs", "rollout_logprobs"}}
    both = {"old_logprobs": torch.tensor([1.5, 1, 1, 3]).log(), "rollout_logprobs": torch.zeros(4)}
    found, metrics = derive(corrected, "correction", rows(**both))
    assert found.tolist() == pytest.approx([1.5, 0, 1, 0])
    assert metrics.values_by_name() == {"correction_filtered": pytest.approx(1 / 3)}


def test_all_that_an_algorithm_reads() -> None:
    every = {"tokens", "mask", "temperature"}
    assert reads(configure("sft")) == every
    assert reads(configure("grpo")) == every | {"rewards", "advantages", "old_logprobs"}
    penalised = reads(configure("ppo", {"reward_kl_coef": 0.5}))
    assert penalised == every | {"rewards", "advantages", "old_logprobs", "values", "token_rewards", "ref_logprobs"}


def test_the_weights_of_a_step() -> None:
    params = {"aggregation": "token-mean"}
    dropped = rows(correction=torch.tensor([1.0, 0, 0, 2]), resample_counts=torch.tensor([2.0, 0.0]))
    plain = configure("grpo", params)
    assert step_needs(plain) == {"mask"}
    assert step_gives(plain) == {"loss_weights"}
    assert step_columns(plain, dropped)["loss_weights"].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert step_columns(plain, dropped, ranks=3)["loss_weights"].tolist() == [1, 0, 1, 1]
    kept = configure("grpo", {**params, "correction": "icepop", "denominator": "kept"})
    assert step_needs(kept) == {"mask", "correction"}
    assert step_columns(kept, dropped)["loss_weights"].tolist() == [0.5, 0, 0, 0.5]
    drawn = configure("grpo", {**params, "resampling": "pow"})
    assert step_needs(drawn) == {"mask", "resample_counts"}
    assert step_columns(drawn, dropped)["loss_weights"].tolist() == [0.5, 0, 0.5, 0]


def test_the_scale_of_what_succeeded() -> None:
    vapo = configure("vapo", {"aggregation": "token-mean"})
    assert step_gives(vapo) == {"loss_weights", "positive_scale"}
    assert step_needs(vapo) == {"mask", "rewards"}
    found = step_columns(vapo, rows())
    assert found["positive_scale"].tolist() == [1.5, 0, 1.5, 0]  # times weights of 1/3, a mean over two tokens
    assert step_columns(vapo, rows(), ranks=2)["positive_scale"].tolist() == [1.5, 0, 1.5, 0]  # the weights are doubled
    nothing = step_columns(vapo, {**rows(), "rewards": torch.zeros(2)})
    assert nothing["positive_scale"].tolist() == [0, 0, 0, 0]
    drawn = step_columns(configure("vapo", {"resampling": "pow"}), {**rows(), "resample_counts": torch.tensor([2.0, 1.0])})
    assert drawn["loss_weights"].tolist() == pytest.approx([0.4, 0, 0.4, 0.2])
    assert (drawn["positive_scale"] * drawn["loss_weights"]).tolist() == pytest.approx([0.5, 0, 0.5, 0])


def test_adaptive_coefficients_by_their_column() -> None:
    params = {"kl_coef": 0.1, "kl_target": 6.0, "kl_horizon": 100}
    assert kl_controls(configure("grpo", params)) == {"kl_coef": KLControl(0.1, 6.0, 100, "k3")}
    assert kl_controls(configure("grpo", {"kl_coef": 0.1})) == {}
    both = configure("ppo", {**params, "reward_kl_coef": 0.2, "reward_kl_target": 3.0, "reward_kl_horizon": 50})
    assert kl_controls(both)["reward_kl_coef"] == KLControl(0.2, 3.0, 50, "k1")
    assert kl_controls(both).keys() == {"kl_coef", "reward_kl_coef"}


def test_draws_of_an_algorithm() -> None:
    rewards, uniforms = torch.tensor([1.0, 3.0]), torch.tensor([0.2, 0.3])
    assert resampling(configure("grpo", {"resampling": "pow", "resampling_pow": 1.0}), rewards, uniforms).tolist() == [1.0, 1.0]
    assert resampling(configure("grpo", {"resampling": "pow"}), rewards, uniforms).tolist() == [0.0, 2.0]
    assert resampling(configure("grpo", {"resampling": "max_min"}), rewards, torch.tensor([0.2, 0.7])).tolist() == [1.0, 1.0]


def test_arguments_are_columns_by_name() -> None:
    given = {"old_logprobs": MASK, "rollout_logprobs": LENGTHS, "mask": GROUPS, "more": MASK}
    assert bound(token_tis, given) == [MASK, LENGTHS, GROUPS]
    optional = bound(token_rewards, {"rewards": MASK, "mask": LENGTHS, "lengths": GROUPS, "ref_logprobs": MASK})
    assert [each is None for each in optional] == [False, False, False, True, False, True][: len(optional)]
    with pytest.raises(ColumnError, match="reads column 'rollout_logprobs'"):
        bound(token_tis, {"old_logprobs": MASK, "mask": GROUPS})


def test_a_correction_by_its_name_alone() -> None:
    assert as_mapping("icepop") == {"icepop": {}}
    assert as_mapping(None) == {}
    assert as_mapping({"icepop": {"low": 0.1}}) == {"icepop": {"low": 0.1}}
    chosen = configure("grpo", {"correction": {"icepop": {"low": 0.1}, "token_trust_region": {}}})
    assert corrections_of(chosen)[0] == (icepop, {"low": 0.1})
    assert [params for _, params in corrections_of(chosen)] == [{"low": 0.1}, {}]


def test_what_stays_together() -> None:
    assert [unit_of(configure(name)) for name in ("grpo", "gspo", "dpo")] == ["row", "row", "group"]
    ref = loss_ref(configure("reinforce_pp", {"clip_high": 0.5}))
    assert ref.params["clip_high"] == 0.5
    assert "gamma" not in ref.params
