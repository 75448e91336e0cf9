"""parcels: what goes through shared memory, when that is used again, and when it is given back."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from tandem.errors import WorkerError
from tandem.runtime import parcels
from tandem.runtime.parcels import Inbox, Outbox, unpack

BIG = 1 << 16


def deliver(outbox: Outbox, inbox: Inbox, value: object) -> object:
    """A value packed, filled and opened at the other end, which lets go of it as a link's other end does."""
    parcel = outbox.pack(value)
    parcel.fill()
    assert parcel.segment is not None
    loans: dict[int, int] = {}
    for segment in (parcel.segment, *parcel.others):
        loans[segment.ident] = outbox.lend(segment, 1)
        if segment.ident not in inbox._segments:
            inbox.add(segment.ident, segment.capacity, os.dup(segment.fd))
    head, *pieces = inbox.pieces(parcel.num_pieces, loans)
    parcel.close()
    return unpack(head, pieces)


def test_small_values_need_no_segment_and_large_pickles_do() -> None:
    outbox = Outbox()
    assert outbox.pack([torch.ones(3), "text"]).segment is None
    text = "x" * BIG
    assert deliver(outbox, Inbox(), text) == text


def test_a_segment_is_used_again_when_nothing_shows_it_any_more() -> None:
    outbox, inbox = Outbox(), Inbox()
    first = deliver(outbox, inbox, torch.zeros(BIG))
    second = deliver(outbox, inbox, torch.ones(BIG))
    assert len(inbox._segments) == 2
    part = first[3:5]  # a view keeps it too
    del first
    third = deliver(outbox, inbox, torch.full((BIG,), 2.0))
    assert len(inbox._segments) == 3
    assert part.tolist() == [0, 0]
    del part, second
    fourth = deliver(outbox, inbox, np.full(BIG, 3, np.float32))
    assert len(inbox._segments) == 3
    assert third.tolist()[:2] == [2, 2]
    assert fourth.tolist()[:2] == [3, 3]


def test_a_segment_is_held_by_every_receiver_and_a_lost_one_lets_go() -> None:
    outbox = Outbox()
    links = [outbox.join(), outbox.join()]
    parcel = outbox.pack(torch.ones(BIG))
    assert parcel.segment is not None
    for link in links:
        outbox.lend(parcel.segment, link)
    parcel.close()
    assert outbox.take(BIG) is not parcel.segment
    outbox.leave(links[0])
    assert outbox.take(BIG) is not parcel.segment
    outbox.leave(links[1])
    assert outbox.take(4 * BIG) is parcel.segment
    assert outbox.join() == links[0]


def test_what_was_made_in_a_segment_is_not_copied() -> None:
    outbox, inbox = Outbox(), Inbox()
    made = outbox.empty((4, BIG), torch.int32)
    torch.arange(4 * BIG, dtype=torch.int32, out=made.view(-1))
    parcel = outbox.pack([made, made[1:3], torch.zeros(2 * BIG, dtype=torch.uint8)])
    assert parcel.num_bytes < 3 * BIG
    parcel.close()
    whole, rows, other = deliver(outbox, inbox, [made, made[1:3], torch.ones(2 * BIG, dtype=torch.uint8)])
    assert torch.equal(whole, made)
    assert torch.equal(rows, made[1:3])
    assert other.unique().tolist() == [1]
    made[1, 0] = -1
    assert whole[1, 0] == rows[0, 0] == -1  # the same pages
    home = outbox.home(memoryview(made.numpy()).cast("B"))
    assert home is not None
    holding = [made, whole, rows]
    del made, whole, rows
    while holding:
        assert outbox.take(home.capacity) is not home
        holding.pop()
    assert outbox.take(home.capacity) is home


def test_small_tensors_take_no_segment() -> None:
    outbox = Outbox()
    assert outbox.home(memoryview(outbox.empty((100,), torch.float32).numpy()).cast("B")) is None
    assert outbox.empty((0, 5), torch.float32).shape == (0, 5)


def test_more_segments_than_a_message_can_carry_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "_MAX_OTHERS", 2)
    outbox, inbox = Outbox(), Inbox()
    made = [outbox.empty((BIG,), torch.uint8).fill_(i) for i in range(3)]
    arrived = deliver(outbox, inbox, made)
    assert [tensor.unique().tolist() for tensor in arrived] == [[0], [1], [2]]
    assert len(inbox._segments) == 1


def test_what_is_free_is_given_back_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "_KEEP_BYTES", 8 * BIG)
    outbox, inbox = Outbox(), Inbox()
    descriptors = len(os.listdir("/proc/self/fd"))
    for size in (1, 2, 4, 16):
        deliver(outbox, inbox, torch.zeros(size * BIG, dtype=torch.uint8))
    gone = outbox.gone(list(inbox._segments))
    assert len(gone) == 3
    inbox.forget(gone)
    assert len(inbox._segments) == 1
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1


def test_what_cannot_travel_says_so() -> None:
    with pytest.raises(WorkerError, match="a tensor on cuda:1 cannot be sent"):
        parcels._reduce(cast("torch.Tensor", SimpleNamespace(device=torch.device("cuda", 1))))  # this machine may have none
    with pytest.raises(WorkerError, match="cannot be read here"):
        unpack(b"cnowhere\nnothing\n.", ())


def test_a_shape_without_numbers_travels_as_one() -> None:
    sent = torch.empty((BIG, 3), dtype=torch.bfloat16, device="meta")
    parcel = Outbox().pack([sent, sent[:2]])
    first, second = unpack(parcel.head, ())
    assert (first.device.type, first.dtype, first.shape) == ("meta", torch.bfloat16, (BIG, 3))
    assert second.shape == (2, 3)
