"""The contract of ports.WorkerGroup, for every runtime and the fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch

from tandem.data_proto import DataProto
from tandem.errors import RunError
from tandem.ports import Collect, Dispatch, WorkerGroup, register
from tandem.runtime.fake import FakeGroup
from tandem.runtime.inline import InlineGroup
from tandem.types import BatchRef, Key, Metrics


class Doubler:
    """A worker of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[Key] = []

    @register(Dispatch.SPLIT, Collect.CONCAT)
    async def double(self, batch: DataProto, *, by: int = 2) -> DataProto:
        self.seen += batch.keys
        return batch.with_columns(token={"x": batch["x"] * by})

    @register(Dispatch.SPLIT, Collect.CONCAT)
    async def name(self, ref: BatchRef) -> BatchRef:
        return BatchRef(ref.keys, ref.columns | {"y"}, ref.lengths, ref.policies)

    @register(Dispatch.SPLIT, Collect.SUM)
    async def count(self, ref: BatchRef) -> Metrics:
        return Metrics.sum({"rows": len(ref.keys), "tokens": sum(ref.lengths)})

    @register(Dispatch.BROADCAST, Collect.SUM)
    async def everywhere(self, value: float) -> Metrics:
        return Metrics.mean({"value": value})

    @register(Dispatch.RANK_ZERO, Collect.FIRST)
    async def head(self) -> None:
        self.seen.append(Key("head", self.rank))

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def whoami(self) -> int:
        return self.rank

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def fail(self) -> None:
        raise ValueError(f"rank {self.rank} is unwell")

    async def unregistered(self) -> None: ...


class Tripler(Doubler):
    """Found by name on the live worker, although the caller names the parent's method."""

    async def double(self, batch: DataProto, *, by: int = 2) -> DataProto:
        return batch.with_columns(token={"x": batch["x"] * 3})


Make = Callable[[Sequence[object]], WorkerGroup]
RUNTIMES: dict[str, tuple[Make, int]] = {
    "inline": (InlineGroup, 1),
    "inline of 3": (InlineGroup, 3),
    "fake": (lambda workers: FakeGroup(workers[0]), 1),
}
LENGTHS = [5, 1, 1, 2, 1, 7]


@pytest.fixture(params=RUNTIMES, name="runtime")
def _runtime(request: pytest.FixtureRequest) -> tuple[Make, int]:
    return RUNTIMES[request.param]


def batch() -> DataProto:
    keys = [Key("train", i // 2, i % 2) for i in range(len(LENGTHS))]
    return DataProto.make(reversed(keys), LENGTHS, token={"x": torch.arange(sum(LENGTHS))})


def test_a_batch_comes_back_in_its_own_order_whatever_the_number_of_ranks(runtime: tuple[Make, int]) -> None:
    make, size = runtime
    workers = [Doubler(rank) for rank in range(size)]
    group = make(workers)
    assert group.size == size
    rows = batch()
    out = asyncio.run(group.call(Doubler.double, rows, by=10))
    assert out.keys == rows.keys
    assert torch.equal(out["x"], rows["x"] * 10)
    assert sorted(key for worker in workers for key in worker.seen) == sorted(rows.keys)
    named = asyncio.run(group.call(Doubler.name, rows.ref()))
    assert (named.keys, named.lengths, named.columns) == (rows.keys, tuple(LENGTHS), {"x", "y"})


def test_metrics_add_up_and_broadcasts_reach_every_rank(runtime: tuple[Make, int]) -> None:
    make, size = runtime
    workers = [Doubler(rank) for rank in range(size)]
    group = make(workers)

    async def scenario() -> None:
        counted = await group.call(Doubler.count, batch().ref())
        assert counted.values_by_name() == {"rows": 6, "tokens": 17}
        everywhere = await group.call(Doubler.everywhere, 4.0)
        assert (everywhere["value"].value, everywhere["value"].count) == (4.0, size)
        assert await group.call(Doubler.head) is None
        assert [len(worker.seen) for worker in workers] == [1] + [0] * (size - 1)
        assert await group.call_each(Doubler.whoami) == list(range(size))
        assert await group.call(Doubler.whoami) == 0

    asyncio.run(scenario())


def test_the_method_is_found_on_the_live_worker(runtime: tuple[Make, int]) -> None:
    make, size = runtime
    out = asyncio.run(make([Tripler(rank) for rank in range(size)]).call(Doubler.double, batch()))
    assert torch.equal(out["x"], batch()["x"] * 3)


def test_what_is_not_registered_is_refused_and_a_rank_s_failure_is_the_callers(runtime: tuple[Make, int]) -> None:
    make, size = runtime
    group = make([Doubler(rank) for rank in range(size)])
    with pytest.raises(RunError, match=r"Doubler\.unregistered.*@register"):
        asyncio.run(group.call(Doubler.unregistered))
    with pytest.raises(ValueError, match="unwell"):
        asyncio.run(group.call(Doubler.fail))
