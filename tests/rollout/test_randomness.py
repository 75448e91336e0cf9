"""The draws are uniform, independent of each other, and a function of (seed, key, turn, position) alone."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.rollout.randomness import base, uniforms
from tandem.types import Key

KEY = Key("train", 3, 1)


def draws(bases: list[int], num: int) -> np.ndarray:
    """Draws [len(bases), num] at positions 0, 1, ..."""
    at = np.tile(np.arange(num), len(bases))
    return uniforms(np.repeat(np.array(bases, np.uint64), num), at).reshape(len(bases), num)


def test_golden_values() -> None:
    """A change here changes every sample of every run. The outputs are splitmix64's published ones for seed 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert draws([0], 3)[0].tolist() == [(word >> 11) * 2.0**-53 for word in published]
    assert base(7, KEY, 0) == 7854853282420366344


def test_only_what_is_named_enters() -> None:
    one = draws([base(7, KEY, 0)], 50)
    batch = draws([base(7, Key("eval", 9), 2), base(7, KEY, 0)], 50)
    assert np.array_equal(one[0], batch[1])
    late = uniforms(np.array([base(7, KEY, 0)], np.uint64), np.array([31]))
    assert late[0] == one[0, 31]


@pytest.mark.parametrize(
    "other",
    [
        (8, KEY, 0),
        (7, KEY, 1),
        (7, Key("train", 3, 2), 0),
        (7, Key("train", 4, 1), 0),
        (7, Key("eval", 3, 1), 0),
        (7, Key("train", 3, 1, 1), 0),
    ],
)
def test_everything_that_is_named_enters(other: tuple[int, Key, int]) -> None:
    a, b = draws([base(7, KEY, 0), base(*other)], 2000)
    assert not np.intersect1d(a, b).size
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.08  # 3.6 sigma


def test_uniform_in_the_unit_interval() -> None:
    values = draws([base(1, Key("train", i), 0) for i in range(100)], 1000)
    assert values.min() >= 0
    assert values.max() < 1
    for sample in (values.ravel(), values[:, 0], values[0]):
        counts = np.histogram(sample, 20, (0, 1))[0]
        chi2 = ((counts - len(sample) / 20) ** 2 / (len(sample) / 20)).sum()
        assert chi2 < 43.8, chi2  # 19 degrees of freedom, p = 0.001


def test_neighbours_are_uncorrelated() -> None:
    """Adjacent positions, adjacent ordinals, members and turns."""
    by_ordinal = draws([base(1, Key("train", i), 0) for i in range(300)], 300)
    by_member = draws([base(1, Key("train", 0, i), 0) for i in range(300)], 300)
    by_turn = draws([base(1, KEY, i) for i in range(300)], 300)
    for values in (by_ordinal, by_member, by_turn):
        for a, b in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:])):
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)
        counts = np.histogram2d(values[:, :-1].ravel(), values[:, 1:].ravel(), 10, [[0, 1], [0, 1]])[0]
        want = counts.sum() / 100
        assert ((counts - want) ** 2 / want).sum() < 149  # 99 degrees of freedom, p = 0.001


def test_negative_seeds_and_far_positions() -> None:
    value = uniforms(np.array([base(-1, KEY, 0)], np.uint64), np.array([2**40]))
    assert 0 <= value[0] < 1
