"""Rows whose beginnings are the same tokens, laid out so that each of those tokens is computed once.

A causal model gives a token the same state in all rows that agree up to it, and numerics.py the same bits. So the tokens of a
batch are packed without padding and without repetition, as a tree, whose nodes are cut into segments:

    rows    a b c D E        packed   a b c | D E | F G H        place   0 1 2 3 4
            a b c F G H      a segment's queries are its own tokens,     0 1 2 5 6 7
                             its keys all tokens of its row up to it

Attention takes segments of similar size together (`Bucket`), padded; nothing else is padded. Which tokens are shared follows
from the tokens alone, not from who asked for them.

Legend: B rows, T padded time, N packed tokens, M of them padded, S segments of one bucket, Q queries and W keys of a segment,
padded, K key-value heads, G heads that share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.models.numerics import KEYS, QUERIES, padded

_SLACK = 0.25  # of a bucket's longest window and most queries, by which a segment may be shorter than they are

Ints = npt.NDArray[np.int64]
Segment = tuple[int, int, int]  # row, its first position, the one after its last


class Bucket(NamedTuple):
    """queries [S, Q] and keys [S, W]: which packed tokens they are, those of padding being token 0; first [S]: the position of a
    segment's first query; place [n], token [n]: where in [S, Q] a query is that is no padding, and which packed token it is.
    """

    queries: Tensor
    keys: Tensor
    first: Tensor
    place: Tensor
    token: Tensor


class Prefixes(NamedTuple):
    """tokens and positions, int64 [N]; place [B, T]: which of them is each row's token, 0 past its length."""

    tokens: Tensor
    positions: Tensor
    place: Tensor
    buckets: tuple[Bucket, ...]


def prefixes(tokens: Tensor, lengths: Tensor) -> Prefixes:
    """Of rows int64 [B, T], padded on the right with any token, of which at least one token counts; lengths int64 [B]."""
    sizes = cast("Ints", lengths.numpy())
    table = np.where(np.arange(tokens.shape[1]) < sizes[:, None], tokens.numpy(), -1)
    keys = [row.tobytes() for row in table.astype(">i8")]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    shared = _shared(table[order], sizes[order])  # with the row before; no row before that has more in common
    place, num, segments = np.zeros(table.shape, np.int64), 0, list[Segment]()
    for at, row in enumerate(order.tolist()):
        begin, end = int(shared[at]), int(sizes[row])
        place[row, :begin] = place[order[at - 1], :begin]
        place[row, begin:end] = np.arange(num, num + end - begin)
        num += end - begin
        fork = int(shared[at + 1]) if begin < int(shared[at + 1]) < end else begin
        segments += [(row, *each) for each in ((begin, fork), (fork, end)) if each[0] < each[1]]
    source = np.zeros(num, np.int64)
    rows, times = np.nonzero(table != -1)
    source[place[rows, times]] = rows * table.shape[1] + times
    return Prefixes(
        tokens=torch.from_numpy(table.reshape(-1)[source]),
        positions=torch.from_numpy(source % table.shape[1]),
        place=torch.from_numpy(place),
        buckets=tuple(_bucket(np.array(each, np.int64), place) for each in _similar(segments)),
    )


def causal_bias(bucket: Bucket, K: int, G: int) -> Tensor:
    """Bias of 0 and -inf that hides from a query what comes after it: [S * K, Q * G, W], with 1 for S * K if all begin alike."""
    first = bucket.first[:1] if bool((bucket.first == bucket.first[0]).all()) else bucket.first
    (Q, W), S = (bucket.queries.shape[1], bucket.keys.shape[1]), len(first)
    ahead = torch.arange(W) > (first[:, None] + torch.arange(Q))[..., None]
    bias = torch.zeros(S, Q, W).masked_fill_(ahead, float("-inf")).repeat_interleave(G, 1)
    return bias if S == 1 else bias.repeat_interleave(K, 0)


def output_places(buckets: Sequence[Bucket], M: int, K: int) -> Tensor:
    """Where among the outputs of all buckets, [S, K, Q] each, head k of packed token m is: [M, K]."""
    found, before = torch.zeros(M, K, dtype=torch.int64), 0
    for bucket in buckets:
        S, Q = bucket.queries.shape
        segment, query = bucket.place // Q, bucket.place % Q
        found[bucket.token] = before + (segment[:, None] * K + torch.arange(K)) * Q + query[:, None]
        before += S * K * Q
    return found


def _shared(rows: Ints, sizes: Ints) -> Ints:
    """How many first tokens each of these rows has in common with the one before it, [B + 1]; 0 at both ends."""
    found = np.zeros(len(rows) + 1, np.int64)
    differ = torch.from_numpy(np.not_equal(rows[1:], rows[:-1]))
    first = cast("Ints", torch.where(differ.any(1), differ.int().argmax(1), rows.shape[1]).numpy())
    found[1:-1] = np.minimum(first, np.minimum(sizes[1:], sizes[:-1]))
    return found


def _similar(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Segments (row, begin, end) by bucket: of about as many keys, and of those of about as many queries."""
    for keys in _runs(segments, lambda segment: segment[2], 2 * KEYS):
        yield from _runs(keys, lambda segment: segment[2] - segment[1], KEYS)


def _runs(segments: list[Segment], size: Callable[[Segment], int], slack: int) -> Iterator[list[Segment]]:
    """Longest first; a run ends where a segment is shorter than its first by more than a part of it, and than `slack`."""
    run: list[Segment] = []
    for segment in sorted(segments, key=size, reverse=True):
        if run and size(run[0]) - size(segment) > max(_SLACK * size(run[0]), slack):
            yield run
            run = []
        run.append(segment)
    if run:
        yield run


def _bucket(segments: Ints, place: Ints) -> Bucket:
    row, begin, end = segments[:, 0], segments[:, 1], segments[:, 2]
    own: Ints = end - begin
    queries, keys = np.arange(max(int(own.max()), QUERIES)), np.arange(padded(int(end.max()), KEYS))
    inside: npt.NDArray[np.bool_] = queries < own[:, None]
    at: Ints = begin[:, None] + queries
    tokens = np.where(inside, place[row[:, None], np.minimum(at, place.shape[1] - 1)], 0)
    window = np.where(keys < end[:, None], place[row[:, None], np.minimum(keys, place.shape[1] - 1)], 0)
    found = np.flatnonzero(inside)
    first, token = begin.copy(), tokens.reshape(-1)[found]
    return Bucket(*(torch.as_tensor(each) for each in (tokens, window, first, found, token)))
