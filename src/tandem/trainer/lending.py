"""Trainers that wait for a batch, lent to generation: when it is worth it, and what came of it.

    batch asked for -> worth it? -> engines in the trainers' processes take a share of the requests
    batch there     -> they stand still, their requests go on elsewhere -> plan, update, publish

How long a wait takes is predicted from the last ones, what lending costs from what it cost. With E engines that are there all the
time and one that comes, what takes w seconds takes w E / (E + 1), and lending is worth it where the w / (E + 1) that it spares are
more than its cost: the time to lend and to take back, and that of the tokens that are computed again, at the speed at which lent
engines sampled, which is an upper bound, since a prompt is read faster than an answer is written. Before there is a cost it is
tried, and a cost that kept it from being tried is forgotten after some waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Protocol

from tandem.ports import Source
from tandem.types import BatchRef, Json, Metrics, PolicyRef

_REMEMBERED = 8  # waits, and loans; and waits after which a loan that keeps others from being made is forgotten


class Borrower(Protocol):
    """Who takes the trainers: a router of rollout engines."""

    @property
    def num_own(self) -> int: ...
    async def lend(self) -> None: ...
    async def take_back(self) -> None: ...
    def account(
        self,
    ) -> tuple[int, int]: ...  # tokens that lent engines sampled, and that others computed again, since the last time


@dataclass(frozen=True)
class Loan:
    """What came of one. sampling_s: that the lent engines had; switching_s: to lend and to take back; again: tokens."""

    sampling_s: float
    switching_s: float
    sampled: int
    again: int


@dataclass
class Rule:
    """What is remembered: seconds that a batch was waited for, and loans. declined: waits in a row without a loan."""

    waits: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    loans: deque[Loan] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    declined: int = 0

    @property
    def wait_s(self) -> float:
        """Predicted; 0 where nothing is known."""
        return sum(self.waits) / max(1, len(self.waits))

    @property
    def cost_s(self) -> float:
        """Predicted, of a loan; 0 where nothing is known."""
        again_s = sum(loan.again for loan in self.loans) * self._token_s
        return (sum(loan.switching_s for loan in self.loans) + again_s) / max(1, len(self.loans))

    @property
    def _token_s(self) -> float:
        return sum(loan.sampling_s for loan in self.loans) / max(1, sum(loan.sampled for loan in self.loans))

    def decide(self, num_own: int) -> bool:
        """Whether to lend now."""
        worth = self.wait_s / (num_own + 1) > self.cost_s
        self.declined = 0 if worth else self.declined + 1
        if self.declined == _REMEMBERED and self.loans:
            self.loans.popleft()
            self.declined = 0
        return worth


class LendingSource:
    """Implements ports.Source: the batches of another one, while which are waited for trainers may be lent."""

    def __init__(self, source: Source, borrower: Borrower) -> None:
        self._source, self._borrower = source, borrower
        self._rule = Rule()
        self._lent: tuple[float, float] | None = None  # for this batch: seconds of sampling, and to lend and to take back
        self._metrics = Metrics()

    @property
    def policy(self) -> PolicyRef:
        return self._source.policy

    async def __aiter__(self) -> AsyncGenerator[BatchRef]:
        async with aclosing(aiter(self._source)) as batches:
            while True:
                self._lent, worth = None, self._rule.decide(self._borrower.num_own)
                told = {"decided": float(worth), "predicted_s": self._rule.wait_s}
                began_s = time.perf_counter()
                lending, came = asyncio.create_task(self._lend(), name="lend") if worth else None, False
                try:
                    batch = await anext(batches)
                    came = True
                finally:
                    if lending is not None:
                        if not came:  # the run ends
                            lending.cancel()
                        await asyncio.wait([lending])
                waited_s = time.perf_counter() - began_s
                self._rule.waits.append(waited_s)
                if lending is not None:
                    self._lent = waited_s - lending.result(), lending.result() + await self._take_back()
                self._metrics += Metrics.sum(told | {"waited_s": waited_s}).prefixed("lend")
                yield batch

    async def advance(self, policy: PolicyRef) -> Metrics:
        metrics, self._metrics = self._metrics, Metrics()
        if self._lent is not None:
            metrics += self._settled(*self._lent)
        return metrics + await self._source.advance(policy)

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._source.training()

    def state(self) -> dict[str, Json]:
        return self._source.state()

    def restore(self, state: Mapping[str, Json]) -> None:
        self._source.restore(state)

    async def _lend(self) -> float:
        """How long it took."""
        began_s = time.perf_counter()
        await self._borrower.lend()
        return time.perf_counter() - began_s

    async def _take_back(self) -> float:
        """How long it took."""
        began_s = time.perf_counter()
        await self._borrower.take_back()
        return time.perf_counter() - began_s

    def _settled(self, sampling_s: float, switching_s: float) -> Metrics:
        """What it came to, and what the next one is thought to cost: of what was taken back all has gone on by now."""
        loan = Loan(sampling_s, switching_s, *self._borrower.account())
        self._rule.loans.append(loan)
        told = {"tokens": loan.sampled, "tokens_again": loan.again, "switching_s": switching_s, "cost_s": self._rule.cost_s}
        return Metrics.sum(told).prefixed("lend")
