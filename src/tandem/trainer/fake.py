"""A Source and a Learner for tests: batches without rows, and a record of what was asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import cast

from tandem.errors import RunError
from tandem.types import BatchRef, Json, Key, Metrics, PolicyRef


class FakeSource:
    """Implements ports.Source: batch i is one row with key fake:i. calls: what happened, in order."""

    def __init__(self, policy: PolicyRef | None = None) -> None:
        self.policy = policy or PolicyRef()
        self.calls: list[str] = []
        self._next = 0
        self._out = False

    async def __aiter__(self) -> AsyncGenerator[BatchRef]:
        try:
            while True:
                if self._out:
                    raise RunError("a batch was asked for before advance() gave the last one back")
                batch = BatchRef((Key("fake", self._next),), frozenset({"tokens"}), (1,), (self.policy,))
                self._next, self._out = self._next + 1, True
                self.calls.append("batch")
                yield batch
        finally:
            self.calls.append("closed")

    async def advance(self, policy: PolicyRef) -> Metrics:
        if not self._out:
            raise RunError(f"advance({policy}) without a batch")
        self._out = False
        self.policy = policy
        self.calls.append(f"advance {policy.version}")
        return Metrics.sum({"fake/advanced": 1})

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        self.calls.append("training")
        yield
        self.calls.append("trained")

    def state(self) -> dict[str, Json]:
        """The batch that is out counts as not given."""
        return {"policy": [self.policy.name, self.policy.incarnation, self.policy.version], "next": self._next - self._out}

    def restore(self, state: Mapping[str, Json]) -> None:
        name, incarnation, version = cast("tuple[str, int, int]", state["policy"])
        self.policy = PolicyRef(name, incarnation + 1, version)
        self._next = cast("int", state["next"])


class FakeLearner:
    """Implements ports.Learner. batches: what it was given."""

    def __init__(self) -> None:
        self.batches: list[BatchRef] = []

    async def update(self, batch: BatchRef, policy: PolicyRef) -> Metrics:
        del policy
        self.batches.append(batch)
        return Metrics.mean({"train/loss": 1.0})
