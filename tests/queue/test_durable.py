"""DurableQueue: what outlives its process, and what a restore makes of it. The rules themselves are in the contract suite."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import faults
from tandem.data_proto import DataProto
from tandem.errors import ColumnError, QueueError, SnapshotError, StalledError
from tandem.ports import Consumer
from tandem.queue.durable import DurableQueue
from tandem.queue.encoding import decode, encode
from tandem.queue.log import Log
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.types import GroupKey, Key, PolicyRef
from tests.forks import FORKS

LEARNER = Consumer("learner")
TOKENS = frozenset({"tokens"})
GROUPS = 6


def group(ordinal: int) -> GroupKey:
    return GroupKey("train", ordinal)


def rows(*ordinals: int, version: int = 0, members: tuple[int, ...] = (0, 1)) -> DataProto:
    keys = [Key("train", ordinal, member) for ordinal in ordinals for member in members]
    tokens = torch.tensor([10 * key.ordinal + key.member for key in keys]).repeat_interleave(3)
    return DataProto.make(
        keys, [3] * len(keys), token={"tokens": tokens}, objects={"policy": [((PolicyRef(version=version), 3),)] * len(keys)}
    )


def opened(directory: Path) -> DurableQueue:
    return DurableQueue(directory / "queue", QueueConfig(stall_limit_s=0.02))


async def fill(queue: MemoryQueue, *ordinals: int, version: int = 0) -> None:
    for ordinal in ordinals:
        await queue.reserve(group(ordinal), 2)
        await queue.put(rows(ordinal, version=version))


async def offered(queue: MemoryQueue, name: str = "account") -> list[int]:
    """Ordinals of the groups that can be taken in order; what is in them is checked."""
    found: list[int] = []
    while True:
        try:
            lease = await queue.take(Consumer(name), TOKENS, 1)
        except StalledError:
            return found
        (ordinal,) = {key.ordinal for key in lease.ref.keys}
        expected = [10 * ordinal + key.member for key in lease.ref.keys for _ in range(3)]
        assert (await queue.get(lease.ref.keys, TOKENS))["tokens"].tolist() == expected
        found.append(ordinal)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


# --------------------------------------------------------------------------------------------------- killed


def work(directory: Path) -> None:
    """Fills groups and consumes each second turn one, which a snapshot makes final; goes on from what it finds."""
    snapshots = sorted(directory.glob("step-*"))

    async def scenario() -> None:
        queue = opened(directory)
        await queue.restore("", snapshots[-1] if snapshots else None)
        consumed = json.loads((snapshots[-1] / "consumed").read_text()) if snapshots else []
        with (directory / "returned").open("a", buffering=1) as returned:
            for ordinal in range(GROUPS):
                if ordinal not in consumed and await queue.reserve(group(ordinal), 2):
                    await queue.put(rows(ordinal))
                    returned.write(f"{ordinal}\n")
                if ordinal % 2 and len(consumed) <= ordinal // 2:
                    consumed = await consume(queue, consumed, directory)
        while len(consumed) < GROUPS:
            consumed = await consume(queue, consumed, directory)
        await queue.close()

    asyncio.run(scenario())


async def consume(queue: DurableQueue, consumed: list[int], directory: Path) -> list[int]:
    lease = await queue.take(LEARNER, TOKENS, 1)
    await queue.ack(lease)
    consumed = [*consumed, lease.ref.groups[0].ordinal]
    partial = directory / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    await queue.save(partial)
    (partial / "consumed").write_text(json.dumps(consumed))
    partial.rename(directory / f"step-{len(consumed)}")
    await queue.commit(str(len(consumed)))
    return consumed


def forked(target: Callable[..., None], *arguments: Any, crash_at: str = "") -> int | None:
    process = FORKS.Process(target=_child, args=(target, arguments, crash_at))
    process.start()
    process.join(60)
    return process.exitcode


def _child(target: Callable[..., None], arguments: tuple[Any, ...], crash_at: str) -> None:
    if crash_at:
        os.environ["TANDEM_CRASH_AT"] = crash_at
    faults.arm()
    target(*arguments)


POINTS = {
    "queue.before_put": (1, 4),
    "queue.after_put": (1, 4),
    "queue.before_log": (1, 3, 7),
    "queue.in_log": (1, 3, 7),
    "queue.after_log": (1, 3, 7),
    "queue.after_take": (1, 3),
    "queue.after_ack": (1, 3),
    "queue.before_save": (1, 3),
    "queue.in_save": (1, 3),
    "queue.after_save": (1, 3),
}


@pytest.mark.parametrize(("point", "passage"), [(point, passage) for point, at in POINTS.items() for passage in at])
def test_what_was_put_before_a_kill_is_there_and_is_consumed_once(point: str, passage: int, tmp_path: Path) -> None:
    assert forked(work, tmp_path, crash_at=f"{point}:{passage}") == -9
    returned = [int(line) for line in (tmp_path / "returned").read_text().split()] if (tmp_path / "returned").exists() else []
    snapshots = sorted(tmp_path.glob("step-*"))
    consumed = json.loads((snapshots[-1] / "consumed").read_text()) if snapshots else []

    async def account() -> None:
        queue = opened(tmp_path)
        await queue.restore("", snapshots[-1] if snapshots else None)
        there = await offered(queue)
        await queue.close()
        assert set(returned) - set(consumed) <= set(there)
        assert not set(there) & set(consumed)

    run(account())
    assert forked(work, tmp_path) == 0
    assert json.loads((tmp_path / f"step-{GROUPS}" / "consumed").read_text()) == list(range(GROUPS))
    again = [int(line) for line in (tmp_path / "returned").read_text().split()]
    assert len(again) == len(set(again)), "nothing that was put once is put again"


def test_a_queue_that_is_only_opened_again_offers_what_was_not_let_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = opened(tmp_path)
        await fill(queue, 0, 1)
        await queue.reserve(group(2), 2)
        await queue.put(rows(2, members=(1,)))
        await queue.ack(await queue.take(LEARNER, TOKENS, 1))
        await queue.save(tmp_path / "s1")
        await queue.commit("s1")
        await queue.ack(await queue.take(LEARNER, TOKENS, 1))  # provisional, and undone
        await queue.close()
        again = opened(tmp_path)
        with pytest.raises(QueueError, match="only rise"):
            await again.reserve(group(0), 2)
        assert await again.reserve(group(1), 2) == ()
        assert await again.reserve(group(2), 2) == (Key("train", 2, 0),)
        with pytest.raises(QueueError, match="only rise"):
            await again.reserve(group(2), 2)
        await again.put(rows(2, members=(0,)))
        assert await offered(again) == [1, 2]
        await again.close()

    run(scenario())


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.6, 0.9, 0.999])
def test_a_torn_tail_ends_with_the_last_whole_put(keep: float, tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = opened(tmp_path)
        await fill(queue, 0)
        whole = (tmp_path / "queue" / "log.db-wal").stat().st_size
        await fill(queue, 1)
        shutil.copytree(tmp_path / "queue", tmp_path / "torn" / "queue")  # as a loss of power leaves it
        await queue.close()
        wal = tmp_path / "torn" / "queue" / "log.db-wal"
        size = whole + int(keep * (wal.stat().st_size - whole))
        wal.write_bytes(wal.read_bytes()[:size] + b"\xa5" * 100)
        torn = opened(tmp_path / "torn")
        assert await offered(torn) == [0]
        if not await torn.reserve(group(1), 2):
            pytest.fail("the places of a group whose put is lost are open")
        await torn.put(rows(1))
        assert await offered(torn) == [1]
        await torn.close()

    run(scenario())


# ------------------------------------------------------------------------------------------------ restored


def test_what_was_put_after_a_snapshot_is_offered_again_and_what_is_of_lost_weights_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = opened(tmp_path)
        await fill(queue, 0, 1, version=3)
        await queue.reserve(group(2), 2)
        await queue.ack(await queue.take(LEARNER, TOKENS, 1))
        await queue.save(tmp_path / "s1")
        await queue.commit("s1")
        await queue.put(rows(2, version=4))  # open in the snapshot
        await fill(queue, 3, version=4)
        await fill(queue, 4, version=5)
        await queue.reserve(group(5), 2)
        await queue.drop([Key("train", 5, member) for member in (0, 1)], "filtered")
        await queue.reserve(group(6), 2)
        await queue.drop([Key("train", 6, 0)], "abort")
        await queue.put(rows(6, members=(1,), version=4))
        await queue.ack(await queue.take(LEARNER, TOKENS, 1))  # after the save: undone
        await queue.close()

        for _ in range(2):  # killed before the next snapshot, it is the same again
            resumed = opened(tmp_path)
            await resumed.restore("s1", tmp_path / "s1", PolicyRef(incarnation=1, version=4))
            metrics = resumed.metrics().values_by_name()
            assert {name: metrics[name] for name in metrics if "dropped" in name} == {"dropped/lost_policy": 2, "dropped/abort": 1}
            assert metrics["offered_again"] == 5
            assert await offered(resumed) == [1, 2, 3]
            assert [len(await resumed.reserve(group(ordinal), 2)) for ordinal in range(1, 7)] == [0, 0, 0, 2, 2, 0]
            assert len(await resumed.reserve(group(7), 2)) == 2  # has no rows and none after it, so that it is new each time
            await resumed.close()

        await resumed_to_the_end(tmp_path)

    run(scenario())


async def resumed_to_the_end(directory: Path) -> None:
    queue = opened(directory)
    await queue.restore("s1", directory / "s1", PolicyRef(incarnation=1, version=4))
    for ordinal in (4, 5):
        await queue.reserve(group(ordinal), 2)
        await queue.put(rows(ordinal, version=4))
    assert await offered(queue) == [1, 2, 3, 4, 5, 6]
    await queue.save(directory / "s2")
    await queue.commit("s2")
    assert not [record for record in queue._log.read() if record.kind == "count"], "a commit makes the counts final"
    await queue.close()


def test_without_a_snapshot_what_the_first_policy_sampled_is_offered_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = opened(tmp_path)
        await fill(queue, 0, 1)
        await fill(queue, 2, version=1)
        await queue.close()
        again = opened(tmp_path)
        await again.restore("", None, PolicyRef())
        assert await offered(again) == [0, 1]
        assert again.metrics()["dropped/lost_policy"].value == 2
        await again.close()

    run(scenario())


def test_after_an_older_snapshot_than_the_last_committed_nothing_is_offered_that_came_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = opened(tmp_path)
        await fill(queue, 0)
        await queue.save(tmp_path / "s1")
        await queue.commit("s1")
        await fill(queue, 1, 2)
        await queue.ack(await queue.take(LEARNER, TOKENS, 2))
        await queue.save(tmp_path / "s2")
        await queue.commit("s2")
        await fill(queue, 3)
        await queue.close()
        for _ in range(2):
            older = opened(tmp_path)
            await older.restore("s1", tmp_path / "s1", PolicyRef())
            assert older.metrics()["dropped/lost_snapshot"].value == 4, "those of 2, not let go yet, and of 3"
            assert await offered(older) == [0]
            await older.reserve(group(1), 2)
            await older.close()
        again = opened(tmp_path)
        await again.restore("s1", tmp_path / "s1", PolicyRef())
        await again.reserve(group(1), 2)
        await again.put(rows(1))
        await again.close()
        last = opened(tmp_path)
        await last.restore("s1", tmp_path / "s1", PolicyRef())
        assert await offered(last) == [0, 1], "what is put after that restore counts"
        await last.close()

    run(scenario())


def test_snapshots_of_the_two_queues_are_of_one_kind(tmp_path: Path) -> None:
    async def scenario() -> None:
        memory, durable = MemoryQueue(QueueConfig(stall_limit_s=0.02)), opened(tmp_path)
        await fill(memory, 0)
        await memory.save(tmp_path / "m")
        await durable.restore("m", tmp_path / "m", PolicyRef())
        await fill(durable, 1)
        await durable.save(tmp_path / "d")
        await durable.commit("d")
        assert await offered(durable) == [0, 1]
        await memory.restore("d", tmp_path / "d", PolicyRef())
        assert await offered(memory) == [0, 1]
        await durable.close()

    run(scenario())


# -------------------------------------------------------------------------------------------------- the disk


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were put with each transaction so far."""
    found: list[int] = []
    write = Log._write

    def counted(self: Log, batch: Any) -> Any:
        found.append(sum(record.kind == "put" for record in batch.records))
        return write(self, batch)

    monkeypatch.setattr(Log, "_write", counted)
    return found


def test_puts_that_wait_at_the_same_time_share_a_transaction(tmp_path: Path, batches: list[int]) -> None:
    async def scenario() -> None:
        queue = opened(tmp_path)
        async with asyncio.TaskGroup() as producers:
            for ordinal in range(64):
                await queue.reserve(group(ordinal), 2)
                producers.create_task(queue.put(rows(ordinal)))
        await queue.close()

    run(scenario())
    assert sum(batches) == 64
    assert len(batches) <= 3


def test_what_those_put_next_who_waited_for_a_transaction_is_in_the_next_one(tmp_path: Path, batches: list[int]) -> None:
    async def producer(queue: DurableQueue, ordinals: Iterator[int]) -> None:
        for _ in range(4):
            ordinal = next(ordinals)
            await queue.reserve(group(ordinal), 2)
            await queue.put(rows(ordinal))

    async def scenario() -> None:
        queue, ordinals = opened(tmp_path), count()
        await asyncio.gather(*(producer(queue, ordinals) for _ in range(8)))
        await queue.close()

    run(scenario())
    assert batches == [1, 8, 8, 8, 7]


def test_a_full_disk_is_an_error_that_says_so_and_leaves_no_part_of_a_put(tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = opened(tmp_path)
        await fill(queue, 0)
        (pages,) = queue._log._file.execute("PRAGMA page_count").fetchone()
        queue._log._file.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own SQLITE_FULL, as of ENOSPC
        await queue.reserve(group(1), 2)
        big = rows(1).with_columns(token={"big": torch.zeros(6, 10_000)})
        with pytest.raises(SnapshotError, match=r"cannot write .*log\.db: database or disk is full; .* MB are free"):
            await queue.put(big)
        for call in (queue.put(rows(1)), queue.reserve(group(2), 2)):
            with pytest.raises((SnapshotError, QueueError)):
                await call
        await queue.close()
        again = opened(tmp_path)
        assert await offered(again) == [0]
        await again.close()

    run(scenario())


def limited(directory: Path) -> None:
    """Files may not grow beyond what one group needs, by the kernel's word."""

    async def scenario() -> None:
        queue = opened(directory)
        await fill(queue, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        await queue.reserve(group(1), 2)
        with pytest.raises(SnapshotError, match=r"cannot write .*log\.db: .*; .* MB are free"):
            await queue.put(rows(1).with_columns(token={"big": torch.zeros(6, 10_000)}))
        os._exit(0)

    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    asyncio.run(scenario())


def test_a_write_that_the_kernel_refuses_leaves_no_part_of_a_put(tmp_path: Path) -> None:
    assert forked(limited, tmp_path) == 0

    async def scenario() -> None:
        again = opened(tmp_path)
        assert await offered(again) == [0]
        assert len(await again.reserve(group(1), 2)) == 2
        await again.close()

    run(scenario())


def test_two_processes_do_not_share_a_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = opened(tmp_path), opened(tmp_path)
        await fill(first, 0)
        with pytest.raises(SnapshotError, match="another process has it open"):
            await second.reserve(group(1), 2)
        await first.close()

    run(scenario())


def test_a_damaged_log_is_refused_by_record(tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = opened(tmp_path)
        await fill(queue, 0)
        await queue.close()
        path = tmp_path / "queue" / "log.db"
        with sqlite3.connect(path) as file:
            (number, data) = file.execute("SELECT number, data FROM log WHERE kind = 'put'").fetchone()
            file.execute("UPDATE log SET data = ? WHERE number = ?", (data[:-1] + b"\xff", number))
        file.close()
        with pytest.raises(SnapshotError, match=rf"record {number} of .*log\.db is damaged \(.*checksum"):
            await (damaged := opened(tmp_path)).reserve(group(1), 2)
        await damaged.close()
        path.write_bytes(b"no database at all, and longer than a header" * 40)
        with pytest.raises(SnapshotError, match="move it away to go on from a snapshot"):
            await opened(tmp_path).reserve(group(1), 2)

    run(scenario())


# ------------------------------------------------------------------------------------------------- the bytes


def test_rows_come_back_from_bytes_as_they_were() -> None:
    keys = [Key("train", 7, 0), Key("train", 7, 1)]
    made = DataProto.make(
        keys,
        [2, 0],
        token={"tokens": torch.tensor([5, 6]), "mask": torch.tensor([True, False]), "top": torch.arange(6.0).view(2, 3)},
        row={"half": torch.tensor([0.5, -1.5], dtype=torch.bfloat16), "none": torch.empty(2, 0)},
        objects={"policy": [((PolicyRef(version=3), 2),), ()], "note": [{"a": [1, None, "\ud800"]}, float("inf")]},
    )
    found = decode(encode(made))
    assert found.keys == made.keys
    assert found.token_level == made.token_level
    assert found.lengths.tolist() == [2, 0]
    assert found.non_tensor_batch == made.non_tensor_batch
    for name, tensor in made.batch.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert encode(found) == encode(made)


def test_bytes_of_a_disk_make_nothing_but_data() -> None:
    made = DataProto.make([Key("train", 0)], [0], objects={"note": [Path("/")]})
    with pytest.raises(SnapshotError, match=r"hold a pathlib\..*no plain value"):
        decode(encode(made))
    with pytest.raises(ColumnError, match=r"train:0\.0\.0.*kept on a disk"):
        encode(DataProto.make([Key("train", 0)], [0], objects={"note": [lambda: None]}))
    for damaged in (b"", encode(made)[:-1], bytes([*encode(made)[:-1], 0])):
        with pytest.raises(SnapshotError, match="damaged"):
            decode(damaged)
