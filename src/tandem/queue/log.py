"""The log of a durable queue: an append-only list of records in one SQLite file, and group commit.

`append` takes a record into memory; `flush` returns once all that was appended before is on the disk. One thread writes. What is
appended while it does goes into the next transaction, and so does what those append who waited for it, so that all who put at the
same time share one fsync. SQLite's WAL with synchronous=FULL gives the rest: a transaction is there whole or not at all, after a
crash and after a loss of power, and a torn tail ends where its checksum does. The log knows bytes; durable.py knows what they mean.

A log that could not be written once is broken: what memory holds and what is on the disk have parted, and every later call says so.
Crash points: `queue.before_log`, `queue.in_log` (in the transaction), `queue.after_log`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
from collections.abc import Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from tandem.durable import attempt, room, sync
from tandem.errors import SnapshotError
from tandem.faults import crash_point

_FORMAT = 1
_CHECKPOINT_BYTES = 64 << 20  # of the WAL, after which SQLite copies it into the file: each time costs two more fsyncs
_PAGE_BYTES = 8192


class Record(NamedTuple):
    """number: its place in the log, rising from 1."""

    number: int
    kind: str
    data: bytes


@dataclass(frozen=True)
class Facts:
    """What is known beside the records. name: of this log, and no other. committed: the number of the last record that the last
    committed snapshot has seen. last: space -> highest ordinal of its groups that were let go.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    committed: int = 0
    last: dict[str, int] = field(default_factory=dict[str, int])


@dataclass
class _Batch:
    """What one transaction does. waiting: of those who wait until it is on the disk."""

    records: list[Record] = field(default_factory=list[Record])
    forget: list[int] = field(default_factory=list[int])
    facts: Facts | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])


class Log:
    """See the module's docstring. One process at a time; one event loop.

    Raises SnapshotError for a file that cannot be opened or written, or is no log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with attempt(f"open {path}", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained("open"):
            # Never two at once: the event loop's thread opens, and the writer's does all else.
            self._file = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._file.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_BYTES // _PAGE_BYTES}")
            (version,) = self._file.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._create()
            elif version != _FORMAT:
                raise SnapshotError(f"{path} is a log of format {version}, and this version reads {_FORMAT}")
            (facts,) = self._file.execute("SELECT data FROM facts").fetchone()
            self.facts = Facts(**json.loads(facts))
            (newest,) = self._file.execute("SELECT max(number) FROM log").fetchone()
        sync(path.parent)
        self.newest: int = max(newest or 0, self.facts.committed)
        """The number of the last record that was appended."""
        self._pending = _Batch()
        self._written: _Batch | None = None  # the one that is being written
        self._busy = False  # writing, or about to write what is pending
        self._broken: SnapshotError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="queue log")

    def _create(self) -> None:
        with self._transaction():
            self._file.execute("CREATE TABLE log (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, data BLOB NOT NULL)")
            self._file.execute("CREATE TABLE facts (data TEXT NOT NULL)")
            self._file.execute("INSERT INTO facts VALUES (?)", (json.dumps(vars(Facts())),))
            self._file.execute(f"PRAGMA user_version = {_FORMAT}")

    # ------------------------------------------------------------------------------------------------- writing

    def append(self, kind: str, data: bytes) -> int:
        """The record's number. It is on the disk after the next `flush`."""
        self._check()
        self.newest += 1
        self._pending.records.append(Record(self.newest, kind, data))
        return self.newest

    def forget(self, numbers: Collection[int], facts: Facts) -> None:
        """These records go, and the facts are others, in the transaction of the next `flush`."""
        self._check()
        self._pending.forget.extend(numbers)
        self._pending.facts = self.facts = facts

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    async def flush(self) -> None:
        """Until all that was asked before this call is on the disk."""
        self._check()
        batch = self._pending if self._pending.records or self._pending.facts else self._written
        if batch is None:
            return
        done = asyncio.get_running_loop().create_future()
        batch.waiting.append(done)
        if not self._busy:
            self._begin()
        await done
        self._check()

    def _begin(self) -> None:
        batch, self._pending = self._pending, _Batch()
        self._written, self._busy = batch, True
        asyncio.get_running_loop().run_in_executor(self._thread, self._write, batch).add_done_callback(self._end)

    def _end(self, written: asyncio.Future[None]) -> None:
        assert self._written is not None
        waiting, self._written = self._written.waiting, None
        if problem := written.exception():
            assert isinstance(problem, SnapshotError), problem
            self._broken = problem
            waiting += self._pending.waiting
        for done in waiting:
            if not done.cancelled():
                done.set_result(None)
        asyncio.get_running_loop().call_soon(self._go_on)  # behind those who waited, whose next records it takes along

    def _go_on(self) -> None:
        self._busy = False
        if self._pending.waiting and self._broken is None:
            self._begin()

    def _write(self, batch: _Batch) -> None:
        """In the writer's thread."""
        crash_point("queue.before_log")
        with self._explained("write"), self._transaction():
            self._file.executemany("INSERT INTO log VALUES (?, ?, ?)", batch.records)
            self._file.executemany("DELETE FROM log WHERE number = ?", ((number,) for number in batch.forget))
            if batch.facts is not None:
                self._file.execute("UPDATE facts SET data = ?", (json.dumps(vars(batch.facts)),))
            crash_point("queue.in_log")
        crash_point("queue.after_log")

    @contextmanager
    def _transaction(self) -> Generator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        with self._file:  # commits, or rolls back
            yield

    # ------------------------------------------------------------------------------------------------- reading

    def read(self) -> list[Record]:
        """All records that are on the disk, in order: not while others write."""
        with self._explained("read"):
            rows = self._file.execute("SELECT number, kind, data FROM log ORDER BY number").fetchall()
        return [Record(*row) for row in cast("list[tuple[int, str, bytes]]", rows)]

    @contextmanager
    def _explained(self, action: str) -> Generator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise SnapshotError(
                    f"cannot {action} {self.path}: another process has it open; wait until that has ended"
                ) from error
            raise SnapshotError(f"cannot {action} {self.path}: {error}; {room(self.path)}") from error
        except sqlite3.DatabaseError as error:
            raise SnapshotError(
                f"cannot {action} {self.path}: {error}; move it away to go on from a snapshot, without what was put after it"
            ) from error

    async def close(self) -> None:
        """What was asked is on the disk, unless the log is broken. Once is enough."""
        if self._broken is None:
            await self.flush()
        self._thread.shutdown()
        self._file.close()
