"""The contract of ports.WorkerGroup, for every runtime and the fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.data_proto import DataProto
from tandem.device import Hardware
from tandem.errors import RunError
from tandem.ports import Collect, Dispatch, WorkerGroup, register
from tandem.runtime.fake import FakeRuntime
from tandem.runtime.inline import InlineGroup
from tandem.runtime.placement import Rank, ResourcePool, place
from tandem.runtime.process import Processes
from tandem.runtime.ray import RayCluster
from tandem.types import BatchRef, Key, Metrics
from tests.runtime.ray_cluster import cluster


class Doubler:
    """A worker of one rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank.index
        self.seen: list[Key] = []

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def what_it_saw(self) -> list[Key]:
        return self.seen

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


Make = Callable[[type[Doubler], int], AbstractAsyncContextManager[WorkerGroup]]


@pytest.fixture(name="process")
def _process(tmp_path: Path) -> Make:
    @asynccontextmanager
    async def make(kind: type[Doubler], size: int) -> AsyncGenerator[WorkerGroup]:
        runtime = Processes(place([ResourcePool("pool", size)], Hardware(cores=size)), tmp_path)
        group = runtime.group("worker", "pool", f"{kind.__module__}:{kind.__name__}")
        async with runtime:
            yield group

    return make


@pytest.fixture(name="ray")
def _ray(tmp_path: Path) -> Make:
    @asynccontextmanager
    async def make(kind: type[Doubler], size: int) -> AsyncGenerator[WorkerGroup]:
        cluster()
        runtime = RayCluster([ResourcePool("pool", size)], tmp_path)
        group = runtime.group("worker", "pool", f"{kind.__module__}:{kind.__name__}")
        async with runtime:
            yield group

    return make


@asynccontextmanager
async def inline(kind: type[Doubler], size: int) -> AsyncGenerator[WorkerGroup]:
    yield InlineGroup([kind(Rank(index, size)) for index in range(size)])


@asynccontextmanager
async def fake(kind: type[Doubler], size: int) -> AsyncGenerator[WorkerGroup]:
    async with FakeRuntime() as runtime:
        yield runtime.group("worker", "pool", f"{kind.__module__}:{kind.__name__}")


SIZES = {"inline": 1, "inline of 3": 3, "inline of 8": 8, "process": 1, "process of 3": 3, "ray of 2": 2, "fake": 1}
PARAMS = [pytest.param(name, marks=pytest.mark.ray) if name.startswith("ray") else name for name in SIZES]
LENGTHS = [5, 1, 1, 2, 1, 7]
Scenario = Callable[[WorkerGroup], Coroutine[Any, Any, None]]
Run = Callable[..., None]


@pytest.fixture(params=PARAMS, name="run")
def _run(request: pytest.FixtureRequest, process: Make, ray: Make) -> Run:
    """Runs a scenario with a group of this runtime."""
    make = {"inline": inline, "process": process, "ray": ray, "fake": fake}[request.param.split()[0]]

    def run(scenario: Scenario, kind: type[Doubler] = Doubler) -> None:
        async def main() -> None:
            async with make(kind, SIZES[request.param]) as group:
                assert group.size == SIZES[request.param]
                await scenario(group)

        asyncio.run(main())

    return run


def batch() -> DataProto:
    keys = [Key("train", i // 2, i % 2) for i in range(len(LENGTHS))]
    return DataProto.make(reversed(keys), LENGTHS, token={"x": torch.arange(sum(LENGTHS))})


def test_a_batch_comes_back_in_its_own_order_whatever_the_number_of_ranks(run: Run) -> None:
    async def scenario(group: WorkerGroup) -> None:
        rows = batch()
        out = await group.call(Doubler.double, rows, by=10)
        assert out.keys == rows.keys
        assert torch.equal(out["x"], rows["x"] * 10)
        seen = await group.call_each(Doubler.what_it_saw)
        assert sorted(key for rank in seen for key in rank) == sorted(rows.keys)
        assert sum(map(bool, seen)) == min(group.size, len(rows))  # with more ranks than rows, some see none
        named = await group.call(Doubler.name, rows.ref())
        assert (named.keys, named.lengths, named.columns) == (rows.keys, tuple(LENGTHS), {"x", "y"})

    run(scenario)


def test_metrics_add_up_and_broadcasts_reach_every_rank(run: Run) -> None:
    async def scenario(group: WorkerGroup) -> None:
        counted = await group.call(Doubler.count, batch().ref())
        assert counted.values_by_name() == {"rows": 6, "tokens": 17}
        everywhere = await group.call(Doubler.everywhere, 4.0)
        assert (everywhere["value"].value, everywhere["value"].count) == (4.0, group.size)
        assert await group.call(Doubler.head) is None
        assert [len(seen) for seen in await group.call_each(Doubler.what_it_saw)] == [1] + [0] * (group.size - 1)
        assert await group.call_each(Doubler.whoami) == list(range(group.size))
        assert await group.call(Doubler.whoami) == 0

    run(scenario)


def test_the_method_is_found_on_the_live_worker(run: Run) -> None:
    async def scenario(group: WorkerGroup) -> None:
        assert torch.equal((await group.call(Doubler.double, batch()))["x"], batch()["x"] * 3)

    run(scenario, Tripler)


def test_what_is_not_registered_is_refused_and_a_rank_s_failure_is_the_callers(run: Run) -> None:
    async def scenario(group: WorkerGroup) -> None:
        with pytest.raises(RunError, match=r"Doubler\.unregistered.*@register"):
            await group.call(Doubler.unregistered)
        with pytest.raises(ValueError, match="unwell"):
            await group.call(Doubler.fail)
        assert await group.call(Doubler.whoami) == 0

    run(scenario)
