"""The TransferQueue whose rows outlive its process: MemoryQueue, with a log on the disk of what fills it.

    put   ->  the ledger (others see the rows)  ->  the log  ->  on the disk: put returns
    save  ->  a whole copy of the ledger in the snapshot, and how far the log was then
    commit -> what was consumed before that save leaves the log
    restore -> the ledger of the snapshot, and what the log has beyond it

The rules are the ledger's, in memory and when the log is read again. Only `put` waits for the disk, and reserved and dropped places
go there with the next put: a place whose fate was lost is open again, which loses nothing. Not in the log are leases and
acknowledgements, which are final with a snapshot and not before, and columns that are written, since the stages that gave them
do so again. A queue that is opened again and not restored offers all that was not let go.

A restore keeps law 10 so: what a version later than the snapshot's policy sampled is of weights that are lost, and its group is
open again; so is a group that was dropped as a whole, since what was logged of that is lost; what was put after a snapshot that
is older than the last committed one is dropped, since a part of it is gone. Metric `offered_again` counts the rows that are, and
`dropped/lost_policy` and `dropped/lost_snapshot` those that are not.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from tandem.data_proto import DataProto, Join
from tandem.errors import QueueError, SnapshotError
from tandem.ports import Lease
from tandem.queue.encoding import decode, encode
from tandem.queue.ledger import Ledger
from tandem.queue.log import Facts, Log, Record
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.types import GroupKey, Key, Metrics, PolicyRef

_POSITION = "log.json"


class DurableQueue(MemoryQueue):
    """Implements ports.TransferQueue; see the module's docstring.

    directory: where the log is; it is made, and the log opened, when the queue is used first. join: as MemoryQueue's. Raises
    SnapshotError where the log cannot be read or written; once it could not be written, every call that would write does.
    """

    def __init__(self, directory: Path, config: QueueConfig | None = None, *, join: Join = torch.cat) -> None:
        super().__init__(config, join=join)
        self._directory = directory
        self._numbers: dict[GroupKey, list[int]] = {}  # of each group's records
        self._counts: list[int] = []  # of the records of what restores dropped
        self._gone: set[GroupKey] = set()  # groups that have records and are not in the ledger
        self._saved: _Saved | None = None

    @cached_property
    def _log(self) -> Log:
        return Log(self._directory / "log.db")

    def _begin(self) -> Ledger:
        ledger, entries = Ledger(self._join), _entries(self._log)
        try:
            _replay(entries, ledger)
        except QueueError as error:
            raise SnapshotError(
                f"{self._log.path} goes on from a snapshot of another queue: restore that one first ({error})"
            ) from error
        ledger.pass_over(self._log.facts.last)
        ledger.offer_again()
        self._adopt(entries, ledger)
        return ledger

    def _adopt(self, entries: Iterable[_Entry], ledger: Ledger) -> None:
        """These are the records in the log."""
        self._numbers, self._counts, self._saved = {}, [], None
        for entry in entries:
            if entry.group is None:
                self._counts.append(entry.number)
            else:
                self._numbers.setdefault(entry.group, []).append(entry.number)
        self._gone = {group for group in self._numbers if group not in ledger}

    async def close(self) -> None:
        if "_log" in vars(self):
            await self._log.close()

    # ------------------------------------------------------------------------------------------------- filling

    async def reserve(self, group: GroupKey, n: int) -> tuple[Key, ...]:
        new = group not in self._ledger
        places = await super().reserve(group, n)
        if new:
            self._append("reserve", group, json.dumps([*group, n]).encode())
        return places

    async def put(self, rows: DataProto) -> None:
        parts = [(part.keys[0].group, encode(part)) for part in _by_group(rows)]
        await super().put(rows)
        for group, data in parts:
            self._append("put", group, data)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self._log.flush()
        self._note_wait("put", clock() - began_s)

    async def drop(self, places: Collection[Key], reason: str) -> None:
        await super().drop(places, reason)
        members: dict[GroupKey, list[int]] = {}
        for place in places:
            members.setdefault(place.group, []).append(place.member)
        for group, its in members.items():
            self._append("drop", group, json.dumps([*group, its, reason]).encode())
        self._leave(members)

    def _append(self, kind: str, group: GroupKey, data: bytes) -> None:
        self._numbers.setdefault(group, []).append(self._log.append(kind, data))

    def _leave(self, groups: Iterable[GroupKey]) -> None:
        self._gone.update(group for group in groups if group not in self._ledger)

    # ----------------------------------------------------------------------------------------------- consuming

    async def ack(self, lease: Lease) -> None:
        await super().ack(lease)
        self._leave(lease.ref.groups)

    # ----------------------------------------------------------------------------------------------- snapshots

    async def save(self, directory: Path) -> None:
        """As MemoryQueue's, and how far the log is."""
        await super().save(directory)
        self._saved = _Saved(self._log.newest, frozenset(self._gone), dict(self._ledger.last))
        (directory / _POSITION).write_text(json.dumps([self._log.facts.name, self._saved.position]), encoding="utf-8")

    async def commit(self, snapshot: str) -> None:
        """Of the last `save`: the records of what was consumed before it go."""
        if self._saved is not None:
            saved, name = self._saved, self._log.facts.name
            final = [number for group in saved.gone for number in self._numbers.pop(group, ())]
            final += [number for number in self._counts if number <= saved.position]
            self._log.forget(final, Facts(name, saved.position, saved.last))
            self._counts = [number for number in self._counts if number > saved.position]
            self._gone -= saved.gone
            self._saved = None
            await self._log.flush()

    async def restore(self, snapshot: str, directory: Path | None, policy: PolicyRef | None = None) -> None:
        log, facts = self._log, self._log.facts
        await log.flush()
        entries = _entries(log)
        name, position = (facts.name, 0) if directory is None else _position(directory)
        await super().restore(snapshot, directory, policy)
        ledger, log.newest = self._ledger, max(log.newest, position)
        if name == facts.name and position >= facts.committed:  # all that came after the save is in the log
            seen = [entry for entry in entries if entry.number <= position]
            gone = {entry.number for entry in seen if entry.group is None or entry.group not in ledger}
            later = [entry for entry in entries if entry.number > position]
            undone, counts = _replay(later, ledger, policy, again=True)
            gone |= undone
            again = sum(len(entry.rows) for entry in later if entry.rows is not None and entry.number not in undone)
            self._noted += Metrics.sum({"offered_again": again})
        else:
            gone = {entry.number for entry in entries}
            counts = sum((Counter(entry.counts) for entry in entries), Counter[str]())
            counts += Counter(lost_snapshot=sum(len(entry.filled - ledger.filled(entry.group)) for entry in entries if entry.group))
            ledger.count(counts)
            facts = replace(facts, committed=position if name == facts.name else log.newest)
        ledger.offer_again()
        self._adopt((entry for entry in entries if entry.number not in gone), ledger)
        if counts:
            self._counts.append(log.append("count", json.dumps(counts).encode()))
        log.forget(gone, facts)
        await log.flush()


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a commit makes final. position: how far the log was. gone: the groups that had left the ledger."""

    position: int
    gone: frozenset[GroupKey]
    last: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record of the log as what it means.

    group: None for a count. n: reserved places. rows: that were put. dropped: places, for `reason`. counts: of rows that a restore
    dropped, by reason.
    """

    number: int
    group: GroupKey | None
    n: int = 0
    rows: DataProto | None = None
    dropped: tuple[Key, ...] = ()
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def filled(self) -> set[Key]:
        return set() if self.rows is None else {key.place for key in self.rows.keys}

    def is_after(self, policy: PolicyRef) -> bool:
        """Whether a later version sampled some of its rows."""
        runs = () if self.rows is None else self.rows.non_tensor_batch.get("policy", ())
        return any(sampler.version > policy.version for run in runs for sampler, _ in run)


def _entries(log: Log) -> list[_Entry]:
    return [_entry(log.path, record) for record in log.read()]


def _entry(path: Path, record: Record) -> _Entry:
    number, kind, data = record
    try:
        if kind == "put":
            rows = decode(data)
            return _Entry(number, rows.keys[0].group, rows=rows)
        fields: Any = json.loads(data)
        if kind == "count":
            return _Entry(number, None, counts=fields)
        space, ordinal, what, *reason = fields
        group = GroupKey(space, ordinal)
        if kind == "reserve":
            return _Entry(number, group, n=what)
        return _Entry(number, group, dropped=tuple(Key(*group, member) for member in what), reason=reason[0])
    except (SnapshotError, ValueError) as error:
        raise SnapshotError(
            f"record {number} of {path} is damaged ({error}): move the file away to go on from a snapshot, without what was put "
            f"after it"
        ) from error


def _replay(
    entries: Sequence[_Entry], ledger: Ledger, policy: PolicyRef | None = None, *, again: bool = False
) -> tuple[set[int], Counter[str]]:
    """Does once more what the log says. Returns the numbers of what was left out, and rows that were dropped with it, by reason.

    policy: rows of later versions are left out. again: what has no row will be filled once more, so that groups that were dropped
    as a whole are left out, and groups after the last one with rows, which keep nobody's place.
    """
    lost = {entry.group for entry in entries if policy is not None and entry.is_after(policy)}
    filled = {entry.group for entry in entries if entry.rows is not None} - lost
    last = {group.space: group.ordinal for group in sorted(group for group in filled if group is not None)}
    left_out, counts = set[int](), Counter[str]()
    drops: dict[GroupKey, list[_Entry]] = {}
    for entry in entries:
        ledger.count(entry.counts)
        if entry.group is None:
            continue
        if entry.n and again and entry.group.ordinal > last.get(entry.group.space, -1):
            left_out.add(entry.number)
        elif entry.n:
            ledger.reserve(entry.group, entry.n)
        elif entry.group in lost:
            left_out.add(entry.number)
            counts.update(lost_policy=len(entry.filled))
        elif entry.rows is not None:
            ledger.put(entry.rows)
        else:
            drops.setdefault(entry.group, []).append(entry)
    for group, its in drops.items():
        dropped = {place for entry in its for place in entry.dropped}
        if again and ledger.filled(group) <= dropped:
            left_out |= {entry.number for entry in its}
            continue
        for entry in its:
            ledger.drop(entry.dropped, entry.reason)
    ledger.count(counts)
    return left_out, +counts


def _position(directory: Path) -> tuple[str, int]:
    """Of the snapshot's save: the log's name, and how far it was; no log's where another queue wrote the snapshot."""
    try:
        name, position = json.loads((directory / _POSITION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "", 0
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{directory / _POSITION} cannot be read: {error}; use an older snapshot") from error
    return name, position


def _by_group(rows: DataProto) -> list[DataProto]:
    runs = [(group, len(list(run))) for group, run in groupby(rows.keys, key=lambda key: key.group)]
    if len(runs) == 1:
        return [rows]
    if len({group for group, _ in runs}) == len(runs):
        return rows.split([size for _, size in runs])
    positions: dict[GroupKey, list[int]] = {}
    for i, key in enumerate(rows.keys):
        positions.setdefault(key.group, []).append(i)
    return [rows.select(its) for its in positions.values()]
