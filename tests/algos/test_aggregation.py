from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.algos.aggregation import AGGREGATIONS, Aggregation, aggregate, loss_weights, mean_over
from tandem.errors import EmptyBatchError

#   row 0: two of three tokens count; row 1: none; row 2: one of one
MASK = torch.tensor([False, True, True, False, False, True])
LENGTHS = torch.tensor([3, 2, 1])


def weights(mode: Aggregation, **more: float) -> Tensor:
    return loss_weights(MASK, LENGTHS, aggregation=mode, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "more", "want"),
    [
        ("token-mean", {}, [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-mean", {}, [1 / 4, 1 / 4, 1 / 2]),
        ("seq-mean-token-sum", {}, [1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-sum-norm", {"length_constant": 10}, [1 / 20, 1 / 20, 1 / 20]),
        ("token-sum", {}, [1, 1, 1]),
    ],
)
def test_weights_by_hand(mode: Aggregation, more: dict[str, float], want: list[float]) -> None:
    got = weights(mode, **more)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[MASK], torch.tensor(want, dtype=torch.float32))
    assert not bool(got[~MASK].any())


def test_ranks_multiply_the_weights() -> None:
    assert torch.equal(weights("token-sum", ranks=3), 3 * MASK.float())


@pytest.mark.parametrize("mode", [mode for mode in AGGREGATIONS if mode != "seq-mean-token-sum-norm"])
def test_nothing_that_counts_is_an_error(mode: Aggregation) -> None:
    with pytest.raises(EmptyBatchError, match="none of the 6 tokens in 3 rows"):
        loss_weights(torch.zeros(6, dtype=torch.bool), LENGTHS, aggregation=mode)
    with pytest.raises(EmptyBatchError):
        loss_weights(torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), aggregation=mode)


def test_rows_that_are_drawn_k_times_count_k_times() -> None:
    drawn = torch.tensor([3.0, 5.0, 1.0])
    assert weights("token-mean", repeats_B=drawn)[MASK].tolist() == pytest.approx([3 / 7, 3 / 7, 1 / 7])  # type: ignore[arg-type]
    assert weights("seq-mean-token-mean", repeats_B=drawn)[MASK].tolist() == pytest.approx([3 / 8, 3 / 8, 1 / 4])  # type: ignore[arg-type]
    with pytest.raises(EmptyBatchError, match="none of these 3 rows was drawn"):
        weights("token-mean", repeats_B=torch.tensor([0.0, 2.0, 0.0]))  # type: ignore[arg-type]


def test_the_length_constant_is_asked_for_and_never_made_up() -> None:
    with pytest.raises(ValueError, match="needs length_constant"):
        weights("seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="does not use length_constant"):
        weights("token-mean", length_constant=5)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="positive"):
            weights("seq-mean-token-sum-norm", length_constant=wrong)
    with pytest.raises(ValueError, match="token-mena"):
        weights("token-mena")  # type: ignore[arg-type]


def test_aggregate_ignores_what_is_masked_in_value_and_gradient() -> None:
    loss = torch.where(MASK, torch.arange(6.0), torch.nan).requires_grad_()
    total = aggregate(loss, torch.where(MASK, 2.0, torch.inf), MASK)
    total.backward()
    assert total.item() == 16
    assert torch.equal(loss.grad, 2.0 * MASK)  # type: ignore[arg-type]


def test_weights_are_divided_in_float64() -> None:
    """Three sevenths are not three times a seventh in float32."""
    found = loss_weights(torch.ones(7, dtype=torch.bool), torch.tensor([7]), ranks=3)
    assert torch.equal(found, torch.full((7,), 3 / 7))
    assert bool((loss_weights(MASK, LENGTHS, aggregation="seq-mean-token-sum-norm", length_constant=0.5)[MASK] == 1.0).all())


def test_a_mean_over_chosen_tokens() -> None:
    """The factor times the weights adds up to one; tokens without a weight are not chosen."""
    chosen, weighing = torch.tensor([True, True, False, True]), torch.tensor([1.0, 0.25, 1.0, 0.0])
    assert mean_over(chosen, weighing).tolist() == [0.5, 2.0, 0.0, 0.0]
    assert mean_over(chosen, weighing, ranks=2).tolist() == [1.0, 4.0, 0.0, 0.0]
    assert mean_over(chosen, weighing, repeats_N=torch.tensor([3.0, 1.0, 1.0, 1.0])).tolist() == [0.75, 1.0, 0.0, 0.0]


def test_counts_may_be_given() -> None:
    """Half a token, or half a row, may stand for what is counted; nothing, or less, may not."""
    assert loss_weights(MASK, LENGTHS, num_tokens=0.5)[MASK].tolist() == [2.0] * 3
    assert loss_weights(MASK, LENGTHS, aggregation="seq-mean-token-sum", num_rows=0.5)[MASK].tolist() == [2.0] * 3
    for wrong in (0.0, -1.0, float("nan")):
        for name in ("num_tokens", "num_rows"):
            with pytest.raises(ValueError, match=name):
                loss_weights(MASK, LENGTHS, **{name: wrong})
