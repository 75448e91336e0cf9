"""Sampling against the distribution written out in plain Python, and rows against themselves in other company."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.errors import NonFiniteError
from tandem.rollout.sampling import Choices, kept_weights, sample


def choices(num: int, *, greedy: bool = False, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Choices:
    return Choices(
        torch.full((num,), greedy),
        torch.full((num,), top_p, dtype=torch.float64),
        torch.full((num,), top_k),
        torch.full((num,), min_p, dtype=torch.float64),
    )


def some_logprobs(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)


def kept_by_hand(probabilities: list[float], top_p: float, top_k: int, min_p: float) -> list[int]:
    ranked = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    ranked = [token for token in ranked if probabilities[token] >= min_p * probabilities[ranked[0]]]
    ranked = ranked[: top_k or None]
    total, before, kept = math.fsum(probabilities[token] for token in ranked), 0.0, []
    for token in ranked:
        if top_p == 1 or before < top_p * total:
            kept.append(token)
        before += probabilities[token]
    return sorted(kept)


CUTS = [
    (1.0, 0, 0.0),
    (0.9, 0, 0.0),
    (0.3, 0, 0.0),
    (1e-9, 0, 0.0),
    (1.0, 1, 0.0),
    (1.0, 5, 0.0),
    (1.0, 999, 0.0),
    (1.0, 0, 0.1),
    (1.0, 0, 0.99),
    (0.7, 6, 0.02),
]


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), CUTS)
def test_the_kept_set(top_p: float, top_k: int, min_p: float) -> None:
    logprobs = some_logprobs(8, 23)
    logprobs[0] = torch.tensor([0.25, 0.25, 0.25, 0.25] + [0.0] * 19).log()  # equals and zeros
    weights = logprobs.softmax(-1)
    c = choices(8, top_p=top_p, top_k=top_k, min_p=min_p)
    kept = kept_weights(weights, c.top_p, c.top_k, c.min_p)
    for row, got in zip(weights, kept, strict=True):
        want = [token for token in kept_by_hand(row.tolist(), top_p, top_k, min_p) if row[token] > 0]
        assert got.nonzero()[:, 0].tolist() == want
        assert torch.equal(got[want], row[want])


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), CUTS)
def test_frequencies(top_p: float, top_k: int, min_p: float) -> None:
    num = 20_000
    row = some_logprobs(1, 11, seed=3)
    uniforms = torch.rand(num, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, _ = sample(row.expand(num, -1), uniforms, choices(num, top_p=top_p, top_k=top_k, min_p=min_p))
    kept = kept_by_hand(row.exp()[0].tolist(), top_p, top_k, min_p)
    want = row.exp()[0, kept].double()
    want *= num / want.sum()
    counts = torch.bincount(tokens, minlength=11).double()
    assert counts[kept].sum() == num
    assert ((counts[kept] - want) ** 2 / want).sum() < 29.6  # 10 degrees of freedom at most, p = 0.001


def test_the_inverse_of_the_distribution_function() -> None:
    """A uniform on a step belongs to the token after it; 0 to the first token that has any probability."""
    row = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]]).log()
    for uniform, want in ((0.0, 1), (0.4999, 1), (0.5, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4)):
        token, logprob = sample(row, torch.tensor([uniform], dtype=torch.float64), choices(1))
        assert token.item() == want
        assert logprob.item() == row[0, want]


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}])
def test_the_largest_uniform_takes_a_token_that_can_be(cut: dict[str, float]) -> None:
    logprobs = torch.cat([some_logprobs(64, 301), torch.full((64, 50), float("-inf"))], 1)
    tokens, chosen = sample(logprobs, torch.full((64,), 1 - 2**-53, dtype=torch.float64), choices(64, **cut))  # type: ignore[arg-type]
    assert torch.isfinite(chosen).all()
    assert (tokens < 301).all()


def test_greedy_takes_the_lowest_of_equals_whatever_the_uniform() -> None:
    row = torch.tensor([[0.1, 0.3, 0.3, 0.3]]).log().expand(3, -1)
    tokens, logprobs = sample(row, torch.tensor([0.0, 0.5, 0.99], dtype=torch.float64), choices(3, greedy=True))
    assert tokens.tolist() == [1, 1, 1]
    assert torch.equal(logprobs, row[:, 1])


def test_logprobs_are_those_of_the_whole_distribution() -> None:
    logprobs = some_logprobs(4, 9)
    tokens, chosen = sample(logprobs, torch.full((4,), 0.5, dtype=torch.float64), choices(4, top_k=1))
    assert torch.equal(tokens, logprobs.argmax(-1))
    assert torch.equal(chosen, logprobs.amax(-1))


@pytest.mark.parametrize("vocabulary", [5, 97, 5003])
def test_a_row_is_the_same_in_any_company(vocabulary: int) -> None:
    """Alone, among rows of every kind, in another place, and with two threads."""
    num = 24
    logprobs = some_logprobs(num, vocabulary)
    uniforms = torch.rand(num, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mixed = Choices(
        torch.arange(num) % 5 == 0,
        torch.where(torch.arange(num) % 3 == 0, 0.8, 1.0).double(),
        torch.where(torch.arange(num) % 4 == 0, 3, 0),
        torch.where(torch.arange(num) % 7 == 0, 0.05, 0.0).double(),
    )

    def part(rows: Tensor) -> tuple[Tensor, Tensor]:
        fields = (mixed.greedy, mixed.top_p, mixed.top_k, mixed.min_p)
        return sample(logprobs[rows], uniforms[rows], Choices(*(field[rows] for field in fields)))

    tokens, chosen = part(torch.arange(num))
    for row in range(num):
        alone = part(torch.tensor([row]))
        assert torch.equal(alone[0][0], tokens[row])
        assert torch.equal(alone[1][0], chosen[row])
    back = part(torch.arange(num).flip(0))
    assert torch.equal(back[0].flip(0), tokens)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = part(torch.arange(num))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again[0], tokens)
    assert torch.equal(again[1], chosen)


def test_nothing_is_sorted_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("sorted")

    monkeypatch.setattr(torch, "sort", refuse)
    sample(some_logprobs(4, 9), torch.rand(4, dtype=torch.float64), choices(4))
    with pytest.raises(AssertionError, match="sorted"):
        sample(some_logprobs(4, 9), torch.rand(4, dtype=torch.float64), choices(4, top_p=0.5))


def test_nan_is_an_error() -> None:
    logprobs = some_logprobs(4, 9)
    logprobs[2] = float("nan")
    for greedy in (False, True):
        with pytest.raises(NonFiniteError, match="1 of 4 rows"):
            sample(logprobs, torch.full((4,), 0.5, dtype=torch.float64), choices(4, greedy=greedy))
