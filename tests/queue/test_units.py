"""The storage units of the TransferQueue library, on a Ray of this machine: what they keep, and how they fail."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group

from tandem.data_proto import DataProto
from tandem.errors import QueueError, StalledError, WorkerError
from tandem.types import Key
from tests.queue.units import running
from tests.runtime.ray_cluster import cluster

pytest.importorskip("transfer_queue")
from tandem.queue import units

pytestmark = pytest.mark.ray
KEYS = tuple(Key("units", ordinal, member) for ordinal in range(3) for member in range(2))
DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def everything() -> DataProto:
    """Token and row columns of all dtypes, with trailing dimensions, and a row without tokens."""
    lengths = [3, 0, 1, 5, 2, 4]
    token = {f"token {dtype}": (10 * torch.rand(15, 2, generator=torch.manual_seed(0))).to(dtype) for dtype in DTYPES}
    row = {f"row {dtype}": (10 * torch.rand(6, generator=torch.manual_seed(1))).to(dtype) for dtype in DTYPES}
    return DataProto.make(KEYS, lengths, token=token, row=row | {"wide": torch.rand(6, 2, 3)}, objects={"name": list("abcdef")})


def assert_equal(found: DataProto, wanted: DataProto) -> None:
    assert found.keys == wanted.keys
    assert found.columns == wanted.columns
    for name, tensor in wanted.batch.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_rows_come_back_as_they_were_in_any_order_from_any_process() -> None:
    async def scenario() -> None:
        rows = everything()
        there: units.StorageUnits = pickle.loads(pickle.dumps(await running()))
        await there.put(rows)
        assert_equal(await there.get(rows.to("meta")), rows)
        some = rows.select([4, 1, 3])
        assert_equal(await there.get(some.to("meta")), some)
        none = rows.select(())
        assert_equal(await there.get(none.to("meta")), none)
        found = await there.get(rows.to("meta"))
        found["wide"].zero_()  # is the receiver's
        assert_equal(await there.get(rows.to("meta")), rows)
        await there.forget(KEYS[:2])
        with pytest.raises(QueueError, match=r"refuses GET_DATA of rows units:0\.0\.0"):
            await there.get(rows.to("meta"))
        await there.forget(KEYS)

    asyncio.run(scenario())


def test_rows_that_are_not_those_of_the_books_are_refused() -> None:
    async def scenario() -> None:
        there, rows = await running(), everything().only({"wide"})
        await there.put(rows)
        other = rows.with_columns(row={"wide": torch.zeros(6, 2, 4)})
        with pytest.raises(QueueError, match=r"144 bytes of column 'wide' and the books torch.float32 \[6, 2, 4\]"):
            await there.get(other.to("meta"))
        await there.forget(KEYS)

    asyncio.run(scenario())


def test_units_start_where_workers_hold_all_cores_and_each_has_its_groups() -> None:
    async def scenario() -> None:
        cluster()
        held = placement_group([{"CPU": ray.available_resources()["CPU"]}])
        assert held.wait(30)
        try:
            there = await units.start()
        finally:
            remove_placement_group(held)
        assert len(there.actors) == 2
        rows = everything()
        await there.put(rows)
        assert_equal(await there.get(rows.to("meta")), rows)
        first, second = (units.StorageUnits([address]) for address in there.addresses)
        of_first, of_second = rows.select([0, 1, 4, 5]), rows.select([2, 3])
        assert_equal(await second.get(of_second.to("meta")), of_second)
        with pytest.raises(QueueError, match="refuses"):
            await first.get(of_second.to("meta"))

        stopped: int = ray.get(there.actors[1].__ray_call__.remote(_pid))
        os.kill(stopped, signal.SIGSTOP)
        limits, units._ANSWER_LIMIT_S, units._LOOK_S = (units._ANSWER_LIMIT_S, units._LOOK_S), 0.5, 0.1
        try:
            with pytest.raises(StalledError, match=r"GET_DATA of 2 rows has waited 0.5 s for storage unit .*whose process lives"):
                await there.get(rows.to("meta"))
            assert_equal(await there.get(of_first.to("meta")), of_first)
            os.kill(stopped, signal.SIGKILL)
            units._ANSWER_LIMIT_S = 60
            began = time.monotonic()
            with pytest.raises(WorkerError, match=r"storage unit .* is gone.*--resume"):
                await there.get(rows.to("meta"))
            assert time.monotonic() - began < 20
        finally:
            units._ANSWER_LIMIT_S, units._LOOK_S = limits
        await there.close()

    asyncio.run(scenario())


def _pid(actor: Any) -> int:
    return os.getpid()


def test_without_a_cluster_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(WorkerError, match="enter the Ray runtime"):
        asyncio.run(units.start())
