"""When trainers are lent while a batch is waited for, and what is told of it; what it does to requests: tests/rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tandem.errors import RunError
from tandem.ports import Source
from tandem.trainer.fake import FakeSource
from tandem.trainer.lending import LendingSource, Loan, Rule
from tandem.types import BatchRef, Metrics, PolicyRef


def test_lending_is_worth_it_where_it_spares_more_than_it_costs() -> None:
    rule = Rule()
    assert not rule.decide(1)  # nothing is known
    rule.waits.extend([3.0, 5.0])
    assert rule.wait_s == 4
    assert rule.decide(1)  # what it costs is found out
    rule.loans.append(Loan(sampling_s=10.0, switching_s=0.9, sampled=100, again=10))
    assert rule.cost_s == pytest.approx(0.9 + 10 * 0.1)
    assert rule.decide(1)
    assert not rule.decide(2)  # of three engines it is a third
    rule.loans.append(Loan(sampling_s=10.0, switching_s=3.1, sampled=100, again=0))
    assert rule.cost_s == pytest.approx((0.9 + 3.1 + 1.0) / 2)
    assert not rule.decide(1)
    rule.waits.extend([6.0] * 8)
    assert rule.decide(1)  # what is long ago is forgotten


def test_a_cost_that_keeps_trainers_from_being_lent_is_not_remembered_for_ever() -> None:
    rule = Rule()
    rule.waits.append(1.0)
    rule.loans.append(Loan(sampling_s=1.0, switching_s=2.0, sampled=10, again=0))
    assert [rule.decide(1) for _ in range(9)] == [False] * 8 + [True]


class Waiting(FakeSource):
    """Waits so long for each batch."""

    def __init__(self, waits: list[float]) -> None:
        super().__init__()
        self._waits = waits

    async def __aiter__(self) -> AsyncGenerator[BatchRef]:
        async for batch in super().__aiter__():
            await asyncio.sleep(self._waits.pop(0))
            yield batch


class Borrowed:
    """Says what was asked of it; lending takes so long, and so many tokens are computed again for each that is sampled."""

    num_own = 1

    def __init__(self, lend_s: float = 0.0, again: int = 0) -> None:
        self.asked: list[str] = []
        self._lend_s, self._again = lend_s, again

    async def lend(self) -> None:
        await asyncio.sleep(self._lend_s)
        self.asked.append("lend")

    async def take_back(self) -> None:
        self.asked.append("take back")

    def account(self) -> tuple[int, int]:
        return 10, 10 * self._again


async def steps(source: Source, borrowed: Borrowed, num: int) -> list[Metrics]:
    """What is told of each step, at whose training nothing is lent."""
    told, policy = list[Metrics](), PolicyRef()
    async for _ in source:
        assert borrowed.asked[-1:] != ["lend"]
        policy = policy.next()
        told.append(await source.advance(policy))
        if len(told) == num:
            break
    return told


@pytest.mark.parametrize(("again", "decided"), [(0, [0, 1, 1, 1]), (5, [0, 1, 0, 0])])
def test_trainers_are_lent_by_what_it_cost(again: int, decided: list[int]) -> None:
    """After a step whose wait is known, again and again, or no more where all is computed five times."""
    borrowed = Borrowed(again=again)
    told = asyncio.run(steps(LendingSource(Waiting([0.05] * 4), borrowed), borrowed, 4))
    assert [step["lend/decided"].value for step in told] == decided
    assert borrowed.asked == ["lend", "take back"] * sum(decided)
    assert all(step["lend/waited_s"].value >= 0.05 for step in told)
    assert told[0]["lend/predicted_s"].value == 0
    assert told[1]["lend/predicted_s"].value == pytest.approx(told[0]["lend/waited_s"].value)
    assert told[1]["lend/tokens"].value == 10
    assert told[1]["lend/tokens_again"].value == 10 * again
    assert told[1]["lend/cost_s"].value >= 0.05 * again
    assert "lend/tokens" not in told[0]


def test_a_batch_that_comes_while_trainers_are_being_lent_waits_until_they_are_back() -> None:
    borrowed = Borrowed(lend_s=0.1)
    told = asyncio.run(steps(LendingSource(Waiting([0.05, 0.0]), borrowed), borrowed, 2))
    assert borrowed.asked == ["lend", "take back"]
    assert told[1]["lend/switching_s"].value >= 0.1


class Failing(Waiting):
    async def __aiter__(self) -> AsyncGenerator[BatchRef]:
        async for batch in super().__aiter__():
            yield batch
            if not self._waits:
                raise RunError("nothing more comes")


def test_an_error_of_the_source_does_not_wait_for_a_loan_that_is_being_made() -> None:
    borrowed = Borrowed(lend_s=100)
    with pytest.raises(RunError, match="nothing more comes"):
        asyncio.run(asyncio.wait_for(steps(LendingSource(Failing([0.05]), borrowed), borrowed, 3), 10))
    assert borrowed.asked == []


def test_it_is_the_source_otherwise() -> None:
    inner = FakeSource()
    source = LendingSource(inner, Borrowed())
    assert source.policy == inner.policy
    source.restore(source.state())
