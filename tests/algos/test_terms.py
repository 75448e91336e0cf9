from __future__ import annotations

import math

import pytest
import torch

from tandem.algos.checks import keep
from tandem.algos.composition import LossSum, arguments, inputs_of, loss_sum, parameters_of, parts_of, types_of
from tandem.algos.extra_terms import kl_term, squared_log_ratio
from tandem.algos.policy_losses import cispo, ppo_clip, reinforce
from tandem.algos.preferences import preference_term
from tandem.algos.sequence_losses import sequence_clip
from tandem.algos.terms import LossInputs, TokenLoss, masked_mean, scope_of, whole_groups, whole_rows
from tandem.errors import ColumnError, ConfigError, NonFiniteError
from tandem.types import Metrics

MASK, LENGTHS = torch.tensor([True, False, True]), torch.tensor([2, 1])


def test_keep_selects_and_widens() -> None:
    dirty = torch.tensor([1.0, math.nan, 3.0])
    assert keep(dirty, MASK).tolist() == [1.0, 0.0, 3.0]
    table = torch.stack([dirty, dirty + 1], 1)
    assert keep(table, MASK).tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]
    widened = {
        dtype: keep(torch.ones(3, dtype=dtype), MASK).dtype for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.bool)
    }
    assert widened == {
        torch.bfloat16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
        torch.bool: torch.float32,
    }


def test_a_masked_mean_has_the_count_that_it_is_merged_by() -> None:
    metric = masked_mean(torch.tensor([1.0, math.nan, 4.0]).requires_grad_(), MASK)
    assert (metric.value, metric.count) == (2.5, 2)


def test_what_a_loss_is_given() -> None:
    columns = {"old": torch.tensor([1.0, math.nan, 2.0]), "rewards": torch.tensor([5.0, 7.0])}
    inputs = LossInputs(torch.tensor([-1.0, math.inf, -2.0]), MASK, LENGTHS, columns)
    assert inputs.policy_logprobs.tolist() == [-1.0, 0.0, -2.0]
    assert inputs.token("old").tolist() == [1.0, 0.0, 2.0]
    assert inputs.row("rewards").tolist() == [5.0, 0.0, 7.0]
    assert inputs.of_rows("rewards").tolist() == [5.0, 7.0]
    for read in (inputs.token, inputs.row, inputs.of_rows):
        with pytest.raises(ColumnError, match=r"reads column 'values' and the batch has \['old', 'rewards'\]"):
            read("values")
    terms = TokenLoss({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5, -2.0])}, Metrics())
    assert terms.loss.tolist() == [1.5, 0.0]


def test_a_bad_number_of_a_row_is_found_by_the_rows_key() -> None:
    inputs = LossInputs(None, MASK, LENGTHS, {"rewards": torch.tensor([1.0, math.nan])}, keys=("first", "second"))
    with pytest.raises(NonFiniteError, match="column 'rewards' is nan at row second"):
        inputs.of_rows("rewards")


def test_what_has_been_read_is_no_part_of_what_a_loss_is_given() -> None:
    inputs = LossInputs(None, MASK, LENGTHS, {"advantages": torch.ones(3)})
    assert inputs.token("advantages") is inputs.token("advantages")
    assert "_kept" not in repr(inputs)
    with pytest.raises(TypeError, match="_kept"):
        LossInputs(None, MASK, LENGTHS, {}, _kept={})  # type: ignore[call-arg]


def test_marks_say_how_much_stays_together() -> None:
    def loss(inputs: LossInputs) -> TokenLoss:
        raise NotImplementedError

    assert scope_of(loss) == "token"
    assert scope_of(whole_rows(loss)) == "row"
    assert scope_of(whole_groups(loss)) == "group"
    assert scope_of(preference_term) == "group"


def test_a_sum_takes_the_parameters_of_its_parts() -> None:
    both = loss_sum(ppo_clip, squared_log_ratio)
    assert isinstance(both, LossSum)
    assert loss_sum(ppo_clip) is ppo_clip
    assert parts_of(both) == (ppo_clip, squared_log_ratio)
    assert parts_of(ppo_clip) == (ppo_clip,)
    names = ["clip_low", "clip_high", "dual_clip", "ratio_cap", "log_ratio_clamp", "kl_tau"]
    assert list(parameters_of(both)) == list(types_of(both)) == names
    assert types_of(both)["kl_tau"] is float
    assert types_of(both)["dual_clip"] == float | None
    assert arguments(squared_log_ratio, {"kl_tau": 1.0, "clip_low": 0.1}) == {"kl_tau": 1.0}
    assert inputs_of(kl_term) == ("inputs",)
    assert {scope_of(loss_sum(ppo_clip, kl_term)), scope_of(loss_sum(kl_term, sequence_clip))} == {"token", "row"}


def test_a_sum_adds_terms_and_refuses_what_does_not_fit() -> None:
    given = LossInputs(
        torch.tensor([-1.0]),
        torch.tensor([True]),
        torch.tensor([1]),
        {"old_logprobs": torch.tensor([-2.0]), "advantages": torch.ones(1)},
    )
    found = loss_sum(reinforce, squared_log_ratio)(given, kl_tau=2.0)
    assert {name: term.tolist() for name, term in found.terms.items()} == {"policy": [1.0], "log_ratio": [2.0]}
    assert found.loss.tolist() == [3.0]
    assert found.metrics.values_by_name() == {"squared_log_ratio": 1.0}
    with pytest.raises(TypeError, match="no part of this loss takes clip_low"):
        loss_sum(reinforce, squared_log_ratio)(given, clip_low=0.2)
    with pytest.raises(ConfigError, match="two parts of one loss give the term policy"):
        loss_sum(ppo_clip, cispo)(given)
