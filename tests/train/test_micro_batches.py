from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tandem.train.micro_batches import micro_batches


@given(st.dictionaries(st.integers(0, 99), st.integers(1, 30)), st.integers(1, 60))
def test_every_row_passes_once_within_the_bound(lengths: dict[int, int], max_tokens: int) -> None:
    passes = micro_batches(lengths, max_tokens)
    assert sorted(row for each in passes for row in each) == sorted(lengths)
    for each in passes:
        padded = len(each) * max(lengths[row] for row in each)
        assert padded <= max_tokens or len(each) == 1
    for left, right in pairwise(passes):  # no two neighbours would have fitted into one
        first = min(right, key=lambda row: lengths[row])
        assert (len(left) + 1) * lengths[first] > max_tokens


def test_rows_of_similar_length_pass_together() -> None:
    assert micro_batches({0: 9, 1: 2, 2: 10, 3: 2, 4: 50}, 20) == [[1, 3], [0, 2], [4]]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=12), st.integers(1, 60))
def test_rows_of_one_owner_pass_together(rows: list[tuple[int, int]], max_tokens: int) -> None:
    lengths, owners = {i: length for i, (length, _) in enumerate(rows)}, [owner for _, owner in rows]
    passes = micro_batches(lengths, max_tokens, owners)
    assert sorted(row for each in passes for row in each) == sorted(lengths)
    for each in passes:
        inside = {owners[row] for row in each}
        assert all(row in each for row in lengths if owners[row] in inside)
        assert len(each) * max(lengths[row] for row in each) <= max_tokens or len(inside) == 1


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=12), st.integers(1, 60))
def test_without_padding_a_pass_has_the_tokens_of_its_rows_and_a_group_is_cut_only_where_it_must_be(
    rows: list[tuple[int, int]], max_tokens: int
) -> None:
    lengths, owners = {i: length for i, (length, _) in enumerate(rows)}, [owner for _, owner in rows]
    passes = micro_batches(lengths, max_tokens, owners, whole=False, padding=False)
    assert sorted(row for each in passes for row in each) == sorted(lengths)
    assert all(sum(lengths[row] for row in each) <= max_tokens or len(each) == 1 for each in passes)
    for owner in set(owners):
        own = [row for row in lengths if owners[row] == owner]
        if sum(lengths[row] for row in own) <= max_tokens:
            assert sum(not set(own).isdisjoint(each) for each in passes) == 1
