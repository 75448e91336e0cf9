from __future__ import annotations

import torch

from tandem.algos.selection import covariances, most_covariant, random_covariant

X = torch.tensor([-1.0, -2.0, 5.0, -3.0, -2.0])
A = torch.tensor([2.0, -1.0, 9.0, -2.0, 1.0])
MASK = torch.tensor([True, True, False, True, True])
# Means over counted tokens: x -2, A 0. Products: 2, 0, -, 2, 0.


def test_covariances_are_of_counted_tokens() -> None:
    found = covariances(X, A, MASK)
    assert found.tolist() == [2.0, 0.0, 0.0, 2.0, 0.0]
    assert covariances(X, A + 7, MASK).tolist() == [2.0, 0.0, 0.0, 2.0, 0.0]
    assert covariances(X[:1], A[:1], torch.tensor([False])).tolist() == [0.0]


def test_the_most_covariant_tokens_are_the_stated_share_and_at_least_one() -> None:
    a = torch.tensor([4.0, -3.0, 9.0, -2.0, 1.0])  # products with x - mean x: 4, 0, -, 2, 0
    for frac, chosen in ((1e-3, [1, 0, 0, 0, 0]), (0.49, [1, 0, 0, 0, 0]), (0.5, [1, 0, 0, 1, 0]), (1.0, [1, 1, 0, 1, 1])):
        assert most_covariant(X, a, MASK, cov_frac=frac).long().tolist() == chosen
    assert most_covariant(X, a, torch.zeros(5, dtype=torch.bool)).tolist() == [False] * 5


def test_random_tokens_come_from_between_the_bounds_by_lot() -> None:
    uniforms = torch.tensor([0.9, 0.1, 0.0, 0.2, 0.3])
    a = torch.tensor([4.0, -3.0, 9.0, -2.0, 1.0])

    def drawn(low: float, high: float, frac: float = 0.5) -> list[int]:
        return random_covariant(X, a, MASK, uniforms, cov_frac=frac, cov_low=low, cov_high=high).long().tolist()

    assert drawn(-1.0, 5.0) == [0, 1, 0, 1, 0]
    assert drawn(-1.0, 5.0, 0.25) == drawn(-1.0, 5.0, 1e-3) == [0, 1, 0, 0, 0]
    assert drawn(1.0, 5.0) == [1, 0, 0, 1, 0]
    assert drawn(1.0, 5.0, 0.25) == [0, 0, 0, 1, 0]
    assert drawn(2.0, 4.0) == [0, 0, 0, 0, 0]  # bounds are outside
    assert drawn(3.0, 4.5, 1.0) == [1, 0, 0, 0, 0]
    assert drawn(0.0, 4.0) == [0, 0, 0, 1, 0]


def test_means_are_taken_in_float64() -> None:
    """In float32, 1 is lost beside 2^24."""
    x, a = torch.tensor([4.0, -1.0, -1.0, -1.0, -1.0]), torch.tensor([2.0**24, 1.0, 1.0, 1.0, 1.0])
    for first, second in ((x, a), (a, x)):
        found = covariances(first, second, torch.ones(5, dtype=torch.bool))
        assert found.tolist() == [4 * 13421772.0, *[3355443.0] * 4]
