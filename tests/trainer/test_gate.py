"""The gate's bounds, in any order of events."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tandem.trainer.gate import Gate


@given(n=st.integers(1, 5), k=st.integers(0, 3), first=st.integers(0, 50), moves=st.lists(st.integers(0, 9), max_size=120))
def test_in_flight_and_age_stay_within_the_bounds_that_schedule_proves(n: int, k: int, first: int, moves: list[int]) -> None:
    """Admit as often as the gate lets us, drop some, consume in strict order: no more in flight, and none older."""
    gate = Gate(n, k, first)
    version = first
    waiting: list[int] = []  # version at admission, in admission order
    for move in moves:
        if move < 6 and gate.is_open:
            gate.admit()
            waiting.append(version)
        elif move == 6 and waiting:
            waiting.pop(len(waiting) // 2)
            gate.give_back()
        elif move > 6 and len(waiting) >= n:
            assert all(version - admitted <= k for admitted in waiting[:n])
            del waiting[:n]
            version += 1
            gate.advance(version)
        assert len(waiting) <= (k + 1) * n
    while gate.is_open:
        gate.admit()
        waiting.append(version)
    assert len(waiting) >= n, "a step can always be filled"


@given(n=st.integers(1, 4), drops=st.integers(0, 10))
def test_every_slot_that_is_given_back_admits_exactly_one_more(n: int, drops: int) -> None:
    gate = Gate(n, 0)
    for _ in range(n):
        gate.admit()
    for _ in range(drops):
        assert not gate.is_open
        gate.give_back()
        gate.admit()
    assert not gate.is_open


def test_a_waiter_wakes_when_the_gate_opens() -> None:
    async def scenario() -> None:
        gate = Gate(1, 0)
        await gate.opened()
        gate.admit()
        waiter = asyncio.create_task(gate.opened())
        await asyncio.sleep(0)
        assert not waiter.done()
        gate.advance(1)
        await waiter

    asyncio.run(scenario())


def test_a_restored_gate_goes_on_where_it_was() -> None:
    gate = Gate(2, 0, first_version=7)
    gate.admit()
    gate.admit()
    gate.give_back()
    again = Gate(2, 0)
    again.restore(gate.state(), 7)
    again.admit()
    assert not again.is_open
    again.advance(8)
    assert again.is_open


@pytest.mark.parametrize(("n", "k"), [(0, 0), (1, -1)])
def test_nonsense_is_refused(n: int, k: int) -> None:
    with pytest.raises(ValueError, match="gate needs"):
        Gate(n, k)
