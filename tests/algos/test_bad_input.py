"""Bad input: every pure function and every loss refuses what its parameters' names exclude, and says column, place and value."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.algos import advantages, corrections, distillation, preferences, returns, selection, shaping, values
from tandem.algos.aggregation import loss_weights
from tandem.algos.columns import credit
from tandem.algos.composition import inputs_of
from tandem.algos.functions import loss_function
from tandem.algos.table import configure
from tandem.algos.terms import LossInputs
from tandem.errors import ColumnError, EmptyBatchError, NonFiniteError

MODULES = (advantages, corrections, distillation, preferences, returns, selection, shaping, values)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isfunction(function) and hasattr(function, "__wrapped__") and function.__module__ == module.__name__
}
NEEDED: dict[str, dict[str, Any]] = {
    "overlong_penalty": {"max_len": 8, "buffer_len": 4},
    "stop_properly": {"coef": 0.5},
}
LENGTHS = torch.tensor([3, 2, 4, 3])
SIZES = {"N": 12, "B": 4, "K": 2, "V": 5, "P": 3}
BAD = st.sampled_from([math.nan, math.inf, -math.inf])


def tensor(name: str) -> Tensor:
    """What a parameter of this name promises."""
    if name == "mask_N":
        return torch.tensor([False, True, True, True, False, True, True, False, True, True, True, True])
    if name == "lengths_B":
        return LENGTHS
    if name.startswith("groups_"):
        return torch.tensor([7, 7, 2, 2])
    axes = name.rpartition("_")[2]
    shape = [SIZES.get(axis) or int(axis) for axis in axes]
    if "_ids_" in name:
        return torch.zeros(shape, dtype=torch.int64)
    return -torch.rand(shape, generator=torch.Generator().manual_seed(len(name))) - 0.1


def given_to(function: Callable[..., Any]) -> dict[str, Tensor]:
    optional = inspect.signature(function).parameters
    names = [name for name in inputs_of(function) if optional[name].default is inspect.Parameter.empty or "logprobs" in name]
    return {name: tensor(name) for name in names}


def call(name: str, columns: dict[str, Tensor]) -> Any:
    return FUNCTIONS[name](**columns, **NEEDED.get(name, {}))


def floats(columns: dict[str, Tensor]) -> list[str]:
    """Those whose every number is checked: columns of tokens only beside a mask."""
    return [
        name
        for name, column in columns.items()
        if column.is_floating_point() and ("mask_N" in columns or not name.rpartition("_")[2].startswith("N"))
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_promised_is_accepted(name: str) -> None:
    call(name, given_to(FUNCTIONS[name]))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if floats(given_to(FUNCTIONS[name]))])
@given(bad=BAD, data=st.data())
def test_a_number_that_counts_and_is_not_finite_is_named(name: str, bad: float, data: st.DataObject) -> None:
    columns = given_to(FUNCTIONS[name])
    chosen = data.draw(st.sampled_from(floats(columns)))
    spoilt = columns[chosen].clone()
    of_tokens = chosen.endswith("_N")
    places = columns["mask_N"].nonzero()[:, 0].tolist() if of_tokens else range(len(spoilt))
    place = data.draw(st.sampled_from(list(places)))
    spoilt.view(len(spoilt), -1)[place, -1] = bad
    where = f"row {place}"
    if of_tokens and "lengths_B" in columns:
        row = int((LENGTHS.cumsum(0) <= place).sum())
        where = f"token {place - int(LENGTHS[:row].sum())} of row {row}"
    elif of_tokens:
        where = f"token {place}"
    with pytest.raises(NonFiniteError, match=f"column '{chosen.rpartition('_')[0]}' is {bad} at {where};"):
        call(name, columns | {chosen: spoilt})


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "mask_N" in given_to(FUNCTIONS[name])])
@given(bad=BAD)
def test_what_is_masked_may_hold_anything(name: str, bad: float) -> None:
    columns = given_to(FUNCTIONS[name])
    dirty = {
        key: torch.where(columns["mask_N"], column, bad) if key.endswith("_N") and column.is_floating_point() else column
        for key, column in columns.items()
    }
    for clean, same in zip(tensors_of(call(name, columns)), tensors_of(call(name, dirty)), strict=True):
        assert torch.equal(clean, same)


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple):
        return [each for each in result if isinstance(each, Tensor)]
    return [result.loss] if hasattr(result, "loss") else [result.column]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if len(given_to(FUNCTIONS[name])) > 1])
@given(data=st.data())
def test_columns_of_different_batches_are_refused(name: str, data: st.DataObject) -> None:
    columns = given_to(FUNCTIONS[name])
    shared = {
        axis: [key for key in columns if axis in key.rpartition("_")[2]]
        for axis in SIZES
        if sum(axis in key.rpartition("_")[2] for key in columns) > 1
    }
    if not shared:
        return
    axis = data.draw(st.sampled_from(sorted(shared)))
    chosen = data.draw(st.sampled_from(shared[axis]))
    dimension = chosen.rpartition("_")[2].index(axis)
    longer = torch.cat([columns[chosen], columns[chosen].narrow(dimension, 0, 1)], dimension)
    with pytest.raises(ColumnError, match=rf"has \d+ entries along {axis} and column|add up to"):
        call(name, columns | {chosen: longer})


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "mask_N" in given_to(FUNCTIONS[name])])
def test_masks_are_bool_and_lengths_add_up(name: str) -> None:
    columns = given_to(FUNCTIONS[name])
    with pytest.raises(ColumnError, match="column 'mask' must be bool"):
        call(name, columns | {"mask_N": columns["mask_N"].float()})
    if "lengths_B" in columns:
        with pytest.raises(ColumnError, match="lengths of 4 rows add up to 13 tokens and column 'mask' has 12"):
            call(name, columns | {"lengths_B": LENGTHS + torch.tensor([1, 0, 0, 0])})
        with pytest.raises(ColumnError, match="lengths must be int64"):
            call(name, columns | {"lengths_B": LENGTHS.float()})


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "groups_B" in given_to(FUNCTIONS[name])])
def test_groups_are_told_apart_by_whole_numbers(name: str) -> None:
    columns = given_to(FUNCTIONS[name])
    with pytest.raises(ColumnError, match="column 'groups' must hold whole numbers"):
        call(name, columns | {"groups_B": columns["groups_B"].float()})


def test_another_number_of_axes_is_refused() -> None:
    with pytest.raises(ColumnError, match=r"column 'rewards' must be \[B\], got shape \[4, 1\]"):
        advantages.no_baseline(torch.zeros(4, 1))
    with pytest.raises(ColumnError, match=r"'logprobs' has 3 entries along 2 where 2 are needed"):
        preferences.preference_loss(torch.zeros(3, 3), torch.zeros(3, 3))


def test_a_step_without_a_token_is_refused() -> None:
    with pytest.raises(EmptyBatchError, match="none of the 12 tokens in 4 rows counts"):
        loss_weights(torch.zeros(12, dtype=torch.bool), LENGTHS)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "resampling_weights"])
def test_a_batch_without_rows_is_none_for_a_function_of_rows(name: str) -> None:
    """What says that there is nothing to train on is `loss_weights`."""
    columns = given_to(FUNCTIONS[name])
    none = {
        key: column.new_zeros([0 if axis in "NBP" else SIZES.get(axis, 2) for axis in key.rpartition("_")[2]])
        for key, column in columns.items()
    }
    for result in tensors_of(call(name, none)):
        assert result.numel() == 0 or not result.dim()


def test_there_is_no_drawing_from_no_episode() -> None:
    with pytest.raises(EmptyBatchError, match="column 'scores' is empty"):
        shaping.resampling_weights(torch.zeros(0))


def test_numbers_whose_sum_is_too_large_are_no_mistake() -> None:
    assert torch.isfinite(advantages.no_baseline(torch.full((4,), 3e38))).all()


def test_a_column_that_an_estimator_reads_and_nobody_gave() -> None:
    chosen = configure("ppo")
    rows = {"mask": tensor("mask_N"), "lengths": LENGTHS, "token_rewards": torch.zeros(12)}
    with pytest.raises(ColumnError, match="gae reads column 'values' and the batch has"):
        credit(chosen, rows, {}, torch.arange(4))


# ------------------------------------------------------------------------------------------------------ losses


def loss_inputs(columns: dict[str, Tensor], **more: Any) -> LossInputs:
    return LossInputs(tensor("logprobs_N").requires_grad_(), tensor("mask_N"), LENGTHS, columns, **more)


TOKEN_LOSSES = ("ppo_clip", "cispo", "sequence_clip", "geometric_mean", "dppo_kl", "sapo", "reinforce")


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@given(bad=BAD, place=st.sampled_from(tensor("mask_N").nonzero()[:, 0].tolist()))
def test_a_loss_names_column_key_and_value(name: str, bad: float, place: int) -> None:
    credit_N = tensor("advantages_N")
    credit_N[place] = bad
    row = int((LENGTHS.cumsum(0) <= place).sum())
    given_to_loss = loss_inputs({"old_logprobs": tensor("old_logprobs_N"), "advantages": credit_N}, keys=("a", "b", "c", "d"))
    where = f"token {place - int(LENGTHS[:row].sum())} of row {'abcd'[row]}"
    with pytest.raises(NonFiniteError, match=f"column 'advantages' is {bad} at {where};"):
        loss_function(name)(given_to_loss)


def test_a_loss_is_given_columns_of_its_own_batch() -> None:
    good = {"old_logprobs": tensor("old_logprobs_N"), "advantages": tensor("advantages_N")}
    ppo = loss_function("ppo_clip")
    with pytest.raises(ColumnError, match="'advantages' by token, 12 of them"):
        ppo(loss_inputs(good | {"advantages": torch.zeros(4)}))
    with pytest.raises(ColumnError, match="the loss reads column 'advantages' and the batch has"):
        ppo(loss_inputs({"old_logprobs": good["old_logprobs"]}))
    with pytest.raises(ColumnError, match="column 'rewards' by row, 4 of them"):
        loss_function("tapered_reinforce")(loss_inputs(good | {"rewards": torch.zeros(12)}))
    with pytest.raises(NonFiniteError, match="column 'rewards' is inf at row 2"):
        loss_function("tapered_reinforce")(loss_inputs(good | {"rewards": torch.tensor([0.0, 1, math.inf, 1])}))
    with pytest.raises(ColumnError, match="must be bool"):
        LossInputs(torch.zeros(12), torch.ones(12), LENGTHS, good)
    with pytest.raises(ColumnError, match="add up to 12 tokens and column 'mask' has 11"):
        LossInputs(torch.zeros(11), torch.ones(11, dtype=torch.bool), LENGTHS, good)
    with pytest.raises(ColumnError, match=r"logprobs have shape \[11\]"):
        LossInputs(torch.zeros(11), torch.ones(12, dtype=torch.bool), LENGTHS, good)
