"""The contract of ports.TransferQueue, for every back-end and the fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from tandem.data_proto import DataProto
from tandem.errors import QueueError, SnapshotError, StalledError
from tandem.ports import Consumer, TransferQueue
from tandem.queue.cluster import ClusterQueue
from tandem.queue.durable import DurableQueue
from tandem.queue.fake import FakeQueue, FakeUnits
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.types import GroupKey, Key, PolicyRef
from tests.queue.units import running
from tests.runtime.served import far, near, served, served_by_ray

Make = Callable[[], TransferQueue]


def durable() -> DurableQueue:
    return DurableQueue(Path(mkdtemp()), QueueConfig(stall_limit_s=0.02))


def units() -> ClusterQueue:
    return ClusterQueue(running, QueueConfig(stall_limit_s=0.02))


BACKENDS: dict[str, Make] = {
    "memory": lambda: MemoryQueue(QueueConfig(stall_limit_s=0.02)),
    "memory in another process's hands": lambda: served(lambda: MemoryQueue(QueueConfig(stall_limit_s=0.02))),
    "memory in a Ray controller's hands": lambda: served_by_ray(lambda: MemoryQueue(QueueConfig(stall_limit_s=0.02)), near),
    "memory in the hands of a Ray controller on another machine": lambda: served_by_ray(
        lambda: MemoryQueue(QueueConfig(stall_limit_s=0.02)), far
    ),
    "durable": durable,
    "durable in another process's hands": lambda: served(durable),
    "books apart from rows": lambda: ClusterQueue(FakeUnits().start, QueueConfig(stall_limit_s=0.02)),
    "storage units on Ray": units,
    "storage units in a Ray controller's hands": lambda: served_by_ray(units, near),
    "storage units in the hands of a Ray controller on another machine": lambda: served_by_ray(units, far),
    "fake": FakeQueue,
}
PARAMS = [pytest.param(name, marks=pytest.mark.ray) if "Ray" in name else name for name in BACKENDS]
LEARNER = Consumer("learner")
TOKENS = frozenset({"tokens"})


@pytest.fixture(params=PARAMS, name="make")
def _make(request: pytest.FixtureRequest) -> Make:
    if "units" in request.param:
        pytest.importorskip("transfer_queue")
    return BACKENDS[request.param]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def key(ordinal: int, member: int = 0, branch: int = 0) -> Key:
    return Key("train", ordinal, member, branch)


def rows(*keys: Key, **columns: float) -> DataProto:
    """Row (o, m, b) has o + m + b + 1 tokens of value o; further row columns by keyword."""
    lengths = [1 + k.ordinal + k.member + k.branch for k in keys]
    tokens = torch.cat([torch.full((n,), k.ordinal) for k, n in zip(keys, lengths, strict=True)])
    return DataProto.make(
        keys,
        lengths,
        token={"tokens": tokens},
        row={name: torch.full((len(keys),), value) for name, value in columns.items()},
        objects={"policy": [((PolicyRef(version=k.ordinal), 1),) for k in keys]},
    )


async def fill(queue: TransferQueue, ordinals: range, n: int = 2) -> None:
    for ordinal in ordinals:
        await queue.reserve(GroupKey("train", ordinal), n)
        await queue.put(rows(*(key(ordinal, member) for member in range(n))))


def test_whole_groups_come_in_admission_order_with_rows_in_key_order(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        for ordinal in range(3):
            await queue.reserve(GroupKey("train", ordinal), 2)
        for ordinal in (2, 0, 1):
            for member in (1, 0):
                await queue.put(rows(key(ordinal, member)))
        lease = await queue.take(LEARNER, TOKENS, 2)
        assert lease.ref.keys == (key(0, 0), key(0, 1), key(1, 0), key(1, 1))
        assert lease.ref.lengths == (1, 2, 2, 3)
        assert lease.ref.policies[2] == PolicyRef(version=1)
        assert lease.ref.columns == {"tokens", "policy"}

    run(scenario())


def test_an_incomplete_group_blocks_those_after_it_unless_the_window_passes_it_over(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        await queue.reserve(GroupKey("train", 0), 2)
        await queue.put(rows(key(0, 0)))
        await fill(queue, range(1, 3))
        with pytest.raises(StalledError):
            await queue.take(LEARNER, TOKENS, 1)
        assert (await queue.take(LEARNER, TOKENS, 2, window=1)).ref.groups == (GroupKey("train", 1), GroupKey("train", 2))

    run(scenario())


def test_a_place_may_be_filled_by_several_rows_and_a_dropped_one_completes_its_group(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        await queue.reserve(GroupKey("train", 0), 3)
        await queue.put(rows(key(0, 0, 0), key(0, 0, 1)))
        await queue.drop([key(0, 1)], "abort")
        await queue.put(rows(key(0, 2)))
        assert (await queue.take(LEARNER, TOKENS, 1)).ref.keys == (key(0, 0, 0), key(0, 0, 1), key(0, 2))
        assert queue.metrics()["dropped/abort"].value == 1
        assert "dropped/abort" not in queue.metrics()

    run(scenario())


def test_a_group_whose_places_are_all_dropped_disappears(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        await queue.reserve(GroupKey("train", 0), 2)
        await queue.put(rows(key(0, 0)))
        await fill(queue, range(1, 2))
        await queue.drop([key(0, 0), key(0, 1)], "filtered")
        assert (await queue.take(LEARNER, TOKENS, 1)).ref.groups == (GroupKey("train", 1),)
        with pytest.raises(QueueError, match=r"train:0\.0\.0"):
            await queue.drop([key(0, 0)], "filtered")

    run(scenario())


def test_places_are_filled_once(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        await queue.reserve(GroupKey("train", 4), 2)
        await queue.put(rows(key(4, 0)))
        for bad, why in ((key(4, 0), "filled already"), (key(4, 2), "not reserved"), (key(5, 0), "not reserved")):
            with pytest.raises(QueueError, match=why):
                await queue.put(rows(bad))
        await queue.put(rows(key(4, 1)))
        await queue.ack(await queue.take(LEARNER, TOKENS, 1))
        with pytest.raises(QueueError, match="not reserved"):
            await queue.put(rows(key(4, 0)))
        with pytest.raises(QueueError, match="only rise"):
            await queue.reserve(GroupKey("train", 4), 2)
        with pytest.raises(QueueError, match="at least one"):
            await queue.reserve(GroupKey("train", 5), 0)

    run(scenario())


def test_columns_are_joined_by_key_and_waited_for(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        await fill(queue, range(2))
        wanted = TOKENS | {"score"}
        with pytest.raises(StalledError, match="score"):
            await queue.take(LEARNER, wanted, 2)
        await queue.write(rows(key(1, 1), score=11.0))
        await queue.write(rows(key(1, 0), key(0, 1), score=5.0))
        await queue.write(rows(key(0, 0), score=7.0))
        lease = await queue.take(LEARNER, wanted, 2)
        got = await queue.get((key(1, 1), key(0, 0), key(1, 0)), wanted)
        assert got.keys == (key(1, 1), key(0, 0), key(1, 0))
        assert got.columns == wanted
        assert got["score"].tolist() == [11, 7, 5]
        assert got["tokens"].tolist() == [1, 1, 1, 0, 1, 1]
        with pytest.raises(QueueError, match=r"train:9\.0\.0"):
            await queue.write(rows(key(9), score=1.0))
        with pytest.raises(QueueError, match=r"train:9\.0\.0"):
            await queue.get((key(9),), TOKENS)
        await queue.ack(lease)
        with pytest.raises(QueueError, match=r"train:0\.0\.0"):
            await queue.get((key(0),), TOKENS)

    run(scenario())


def test_no_rows_have_columns_too(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        with pytest.raises(QueueError, match="no row in the queue"):
            await queue.get((), TOKENS)
        await fill(queue, range(2))
        none = await queue.get((), TOKENS)
        assert len(none) == 0
        assert none["tokens"].shape == (0,)
        await queue.write(none)

    run(scenario())


def test_what_is_delivered_twice_counts_once(make: Make) -> None:
    """A repeated call is refused, or writes what is there already; either way nothing is there twice, and no count moves."""

    async def scenario() -> None:
        queue = make()
        await fill(queue, range(3))
        with pytest.raises(QueueError, match="filled already"):
            await queue.put(rows(key(0, 0), key(0, 1)))
        await queue.drop([key(2, 0), key(2, 1)], "stale")
        with pytest.raises(QueueError, match="dropped"):
            await queue.drop([key(2, 0), key(2, 1)], "stale")
        lease = await queue.take(LEARNER, TOKENS, 1)
        credit = DataProto.make([key(0, 0), key(0, 1)], [1, 2], row={"credit": torch.tensor([1.0, 2.0])})
        await queue.write(credit)
        await queue.write(credit)
        assert (await queue.get([key(0, 0), key(0, 1)], frozenset({"credit"})))["credit"].tolist() == [1.0, 2.0]
        await queue.release(lease)
        with pytest.raises(QueueError, match="void"):
            await queue.release(lease)
        await queue.ack(await queue.take(LEARNER, TOKENS, 1))
        with pytest.raises(QueueError, match="not reserved"):
            await queue.put(rows(key(0, 0), key(0, 1)))
        for _ in range(2):
            await queue.commit("1")
        counts = queue.metrics()
        assert (counts["groups"].value, counts["rows"].value, counts["dropped/stale"].value) == (1, 2, 2)

    run(scenario())


def test_leased_rows_are_offered_to_nobody_else_and_acknowledged_once(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        await fill(queue, range(2))
        first = await queue.take(LEARNER, TOKENS, 1)
        second = await queue.take(Consumer("other"), TOKENS, 1)
        assert not set(first.ref.keys) & set(second.ref.keys)
        with pytest.raises(StalledError):
            await queue.take(LEARNER, TOKENS, 1)
        await queue.ack(first)
        with pytest.raises(QueueError, match="void"):
            await queue.ack(first)
        await queue.ack(second)
        assert queue.metrics()["rows"].value == 0

    run(scenario())


def test_a_stage_is_lent_what_lacks_its_columns_and_gives_it_back(make: Make) -> None:
    async def scenario() -> None:
        queue, stage, score = make(), Consumer("stage"), frozenset({"score"})
        await fill(queue, range(4))
        await queue.reserve(GroupKey("train", 4), 2)
        await queue.put(rows(key(4, 0)))
        await queue.write(rows(key(1, 0), key(1, 1), key(2, 1), score=1.0))
        lent = await queue.take(stage, TOKENS, 2, lacking=score)
        assert [k.ordinal for k in lent.ref.groups] == [0, 2]  # 1 has it, and of 2 a part is missing
        assert [k.ordinal for k in (await queue.take(stage, TOKENS, 5, lacking=score)).ref.groups] == [3]  # and 4 is not filled
        with pytest.raises(StalledError, match=r"'stage'.*lack score"):
            await queue.take(stage, TOKENS, 1, lacking=score)
        await queue.write(rows(key(0, 0), key(0, 1), key(2, 0), score=2.0))
        with pytest.raises(StalledError):
            await queue.take(LEARNER, TOKENS | score, 1)  # strict order: 0 is out, and will come back
        assert (await queue.take(LEARNER, TOKENS | score, 1, window=1)).ref.groups == (GroupKey("train", 1),)
        await queue.release(lent)
        with pytest.raises(QueueError, match="void"):
            await queue.release(lent)
        lease = await queue.take(LEARNER, TOKENS | score, 2)
        assert [k.ordinal for k in lease.ref.groups] == [0, 2]
        assert (await queue.get(lease.ref.keys, score))["score"].tolist() == [2, 2, 2, 1]
        with pytest.raises(QueueError, match="asks for 0"):
            await queue.take(stage, TOKENS, 0, lacking=score)

    run(scenario())


def test_what_was_lent_when_a_snapshot_was_saved_is_lent_again(make: Make, tmp_path: Path) -> None:
    async def scenario() -> None:
        queue, score = make(), frozenset({"score"})
        await fill(queue, range(1))
        lent = await queue.take(Consumer("stage"), TOKENS, 1, lacking=score)
        await queue.save(tmp_path / "queue")
        resumed = make()
        await resumed.restore("s1", tmp_path / "queue")
        again = await resumed.take(Consumer("stage", 1), TOKENS, 1, lacking=score)
        assert again.ref.keys == lent.ref.keys

    run(scenario())


def test_a_stage_that_waits_is_woken_by_what_is_put(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        await fill(queue, range(1))
        await queue.write(rows(key(0, 0), key(0, 1), score=1.0))

        async def lent() -> list[int]:
            while True:
                try:
                    lease = await queue.take(Consumer("stage"), TOKENS, 9, lacking=frozenset({"score"}))
                except StalledError:
                    await asyncio.sleep(0)  # the fake never waits
                else:
                    return [k.ordinal for k in lease.ref.groups]

        waiting = asyncio.create_task(lent())
        await fill(queue, range(1, 2))
        assert await waiting == [1]

    run(scenario())


def test_a_newer_incarnation_voids_the_leases_of_the_older(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        await fill(queue, range(1))
        old = await queue.take(LEARNER, TOKENS, 1)
        new = await queue.take(Consumer("learner", 1), TOKENS, 1)
        assert new.ref.keys == old.ref.keys
        with pytest.raises(QueueError, match="void"):
            await queue.ack(old)
        with pytest.raises(QueueError, match="took over"):
            await queue.take(LEARNER, TOKENS, 1)
        await queue.ack(new)

    run(scenario())


def test_a_snapshot_has_what_was_not_acknowledged_and_nothing_else(make: Make, tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = make()
        await fill(queue, range(3))
        await queue.write(rows(key(2, 0), key(2, 1), score=2.5))
        await queue.ack(await queue.take(LEARNER, TOKENS, 1))
        leased = await queue.take(LEARNER, TOKENS, 1)
        await queue.reserve(GroupKey("train", 3), 2)
        await queue.put(rows(key(3, 1)))
        await queue.drop([key(3, 0)], "abort")
        await queue.reserve(GroupKey("train", 4), 1)
        await queue.save(tmp_path / "queue")
        await queue.commit("s1")
        await queue.ack(leased)  # after the save: provisional, and undone by the restore

        for resumed in (make(), queue):
            await resumed.restore("s1", tmp_path / "queue")
            with pytest.raises(QueueError, match="void"):
                await resumed.ack(leased)
            with pytest.raises(QueueError, match="only rise"):
                await resumed.reserve(GroupKey("train", 0), 2)
            lease = await resumed.take(LEARNER, TOKENS, 3)
            assert [k.ordinal for k in lease.ref.keys] == [1, 1, 2, 2, 3]
            assert lease.id > leased.id
            assert (await resumed.get((key(2, 1),), frozenset({"score"})))["score"].item() == 2.5
            with pytest.raises(StalledError):
                await resumed.take(LEARNER, TOKENS, 1)
            await resumed.put(rows(key(4)))
            assert (await resumed.take(LEARNER, TOKENS, 1)).ref.keys == (key(4),)

    run(scenario())


def test_a_damaged_snapshot_is_refused_and_changes_nothing(make: Make, tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = make()
        await fill(queue, range(1))
        await queue.save(tmp_path / "queue")
        next((tmp_path / "queue").glob("rows-*")).unlink()
        with pytest.raises(SnapshotError, match="older snapshot"):
            await queue.restore("s1", tmp_path / "queue")
        with pytest.raises(SnapshotError, match="missing"):
            await queue.restore("s2", tmp_path / "missing")
        assert len((await queue.take(LEARNER, TOKENS, 1)).ref.keys) == 2

    run(scenario())


def test_a_wait_without_progress_says_who_waits_for_what(make: Make) -> None:
    async def scenario() -> None:
        queue = make()
        await queue.reserve(GroupKey("train", 0), 8)
        await fill(queue, range(1, 2))
        with pytest.raises(StalledError, match=r"'learner'.*3 whole groups.*tokens.*1 groups are complete.*train:0 \(8 places"):
            await queue.take(LEARNER, TOKENS, 3)
        for n, window in ((0, 0), (1, -1)):
            with pytest.raises(QueueError, match="asks for"):
                await queue.take(LEARNER, TOKENS, n, window=window)

    run(scenario())
