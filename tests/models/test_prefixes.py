"""Tokens that rows begin with alike are computed once, and nothing that comes out of it can tell."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.models.decoder import Decoder
from tandem.models.prefixes import prefixes
from tests.models.tiny import config, loud

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=7).filter(any)


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """With a token that some rows have."""
    width = max(map(len, rows))
    return torch.tensor([row + [1] * (width - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


@settings(max_examples=60)
@given(ROWS)
def test_every_beginning_is_there_once_and_attends_to_its_own_row(rows: list[list[int]]) -> None:
    found = prefixes(*padded(rows))
    beginnings = {tuple(row[: t + 1]) for row in rows for t in range(len(row))}
    assert len(found.tokens) == len(beginnings)
    path: dict[int, list[int]] = {}
    for row, place in zip(rows, found.place.tolist(), strict=True):
        assert found.tokens[place[: len(row)]].tolist() == row
        assert found.positions[place[: len(row)]].tolist() == list(range(len(row)))
        path |= {place[t]: place[: t + 1] for t in range(len(row))}
    queries = [token for bucket in found.buckets for token in bucket.token.tolist()]
    assert sorted(queries) == list(range(len(found.tokens)))
    for bucket in found.buckets:
        width = bucket.queries.shape[1]
        for at, token in zip(bucket.place.tolist(), bucket.token.tolist(), strict=True):
            segment, query = divmod(at, width)
            position = int(bucket.first[segment]) + query
            assert bucket.keys[segment, : position + 1].tolist() == path[token]


def test_segments_of_other_sizes_are_taken_apart() -> None:
    """A long row is no padding for short ones, and a long beginning is not computed with the ends."""
    alone, short = list(range(2, 202)), [[1, i] for i in range(10)]
    sizes = [tuple(bucket.queries.shape) for bucket in prefixes(*padded([alone, *short])).buckets]
    assert max(sizes, key=lambda size: size[1]) == (1, 200)
    assert all(size[1] <= 4 for size in sizes if size != (1, 200))
    common = [[*range(150), 200 + i] for i in range(5)]
    assert sorted(tuple(bucket.queries.shape) for bucket in prefixes(*padded(common)).buckets) == [(1, 150), (5, 4)]


def check_states(model: Decoder) -> None:
    """Of rows that begin alike, against each row alone, to the bit; and the gradient against the sum of theirs."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(61, (2, 40), generator=generator)
    rows = torch.cat([start.repeat_interleave(4, 0), torch.randint(61, (8, 30), generator=generator)], 1)
    rows[1, 40:45] = rows[0, 40:45]
    lengths = torch.tensor([70, 60, 41, 40, 70, 1, 55, 70])
    at = (torch.arange(70) < lengths[:, None]).nonzero().unbind(1)
    together = model.states_at(rows, lengths, at)
    alone = torch.cat([model.prefill(row[None, :n])[0] for row, n in zip(rows, lengths.tolist(), strict=True)])
    assert torch.equal(together, alone)
    weights = torch.randn(alone.shape, generator=generator)
    parameters = list(model.parameters())
    got, want = (torch.autograd.grad((states * weights).sum(), parameters) for states in (together, alone))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6 * max(1.0, float(theirs.abs().max())), rtol=0)


def test_states_are_those_of_each_row_alone() -> None:
    check_states(loud(config(4, 1)))
