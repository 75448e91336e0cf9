"""The book-keeping of a TransferQueue: which places exist, which rows fill them, who holds what.

A Ledger never waits and knows nothing of tasks or clocks: a back-end (memory.py) calls it and adds the waiting. Every
method checks first and changes afterwards, so that a call that raises has changed nothing.

Life of a group:   reserve -> open places -> put or drop each -> complete -> lease -> ack (gone)
                                                                      ^        |
                                                                      `- void -'  (newer incarnation, restore, release)

Invariants: ordinals of a space are reserved in rising order and never twice, so a row that is gone cannot come back
except by `restore`; a group is in at most one lease; `_blocks` names exactly the rows that are there; `_waiting` are the
groups in no lease or in one that is lent. What a call costs depends on its rows, not on how many others are there; `lend` and
giving back a lease that is not lent look at all groups.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, cast

import torch

from tandem.data_proto import DataProto, Join
from tandem.errors import QueueError, SnapshotError
from tandem.faults import crash_point
from tandem.ports import Consumer, Lease
from tandem.types import GroupKey, Key, Metrics

_FORMAT = 1
_STATE = "queue.json"


@dataclass(slots=True)
class _Group:
    """open: places that are reserved and neither filled nor dropped. rows: keys that are there. lease: its id."""

    open: set[Key]
    rows: set[Key] = field(default_factory=set[Key])
    lease: int | None = None


class Ledger:
    """See the module's docstring. Rows live in blocks as they were put, or as they were leased together.

    join: makes one column of those of several blocks.
    """

    def __init__(self, join: Join = torch.cat) -> None:
        self._join = join
        self._groups: dict[GroupKey, _Group] = {}  # in admission order
        self._waiting: dict[GroupKey, _Group] = {}  # in admission order
        self._restored: set[GroupKey] = set()  # may be reserved once more, by those who fill them
        self._blocks: dict[Key, DataProto] = {}
        self._leases: dict[int, Lease] = {}
        self._next_lease = 0
        self._fences: dict[str, int] = {}  # consumer's name -> its newest incarnation
        self._last: dict[str, int] = {}  # space -> highest ordinal ever reserved
        self._drops: Counter[str] = Counter()

    # ----------------------------------------------------------------------------------------------- rows

    def reserve(self, group: GroupKey, n: int) -> tuple[Key, ...]:
        """The places that are open: all, or what is left of a group that came back with a restore."""
        if n < 1:
            raise QueueError(f"group {group} reserves {n} places; it needs at least one")
        if group in self._restored:
            self._restored.discard(group)
            return tuple(sorted(self._groups[group].open))
        last = self._last.get(group.space, -1)
        if group.ordinal <= last:
            raise QueueError(
                f"group {group} is reserved after {group.space}:{last}: ordinals of a space only rise, so no sample comes twice"
            )
        crash_point("queue.before_reserve")
        self._last[group.space] = group.ordinal
        places = tuple(Key(*group, member) for member in range(n))
        self._groups[group] = self._waiting[group] = _Group(open=set(places))
        crash_point("queue.after_reserve")
        return places

    def put(self, rows: DataProto) -> None:
        groups = self._open(rows.keys)
        if rows.meta_info:
            rows = replace(rows, meta_info={})  # facts about a batch are not facts about its rows
        crash_point("queue.before_put")
        for key, group in zip(rows.keys, groups, strict=True):
            group.open.discard(key.place)
            group.rows.add(key)
            self._blocks[key] = rows
            crash_point("queue.in_put")
        crash_point("queue.after_put")

    def check_open(self, keys: Iterable[Key]) -> None:
        """Raises what `put` of rows with these keys would raise now."""
        self._open(keys)

    def _open(self, keys: Iterable[Key]) -> list[_Group]:
        groups: list[_Group] = []
        for key in keys:
            group = self._groups.get(key.group)
            if group is None or key.place not in group.open:
                filled = group is not None and any(row.place == key.place for row in group.rows)
                why = "is filled already" if filled else "is not reserved (never admitted, dropped or consumed)"
                raise QueueError(f"row {key} cannot be put: its place {key.place} {why}")
            groups.append(group)
        return groups

    def write(self, rows: DataProto) -> None:
        self._check_known(rows.keys, f"columns {sorted(rows.columns)} cannot be written")
        crash_point("queue.before_write")
        written = set(rows.keys)
        merged: list[DataProto] = []
        for block in self._blocks_of(rows.keys):
            touched = [key for key in block.keys if key in written]
            rest = [key for key in block.keys if key not in written]
            merged.append(block.by_keys(touched).join(rows))
            if rest:
                merged.append(block.by_keys(rest))
        crash_point("queue.in_write")
        self.store(merged)
        crash_point("queue.after_write")

    def get(self, keys: Sequence[Key], columns: frozenset[str]) -> DataProto:
        self._check_known(keys, f"columns {sorted(columns)} cannot be read")
        return self._gather(keys, columns) if keys else self._no_rows(columns)

    def drop(self, places: Collection[Key], reason: str) -> set[Key]:
        """Returns the rows that are gone."""
        gone: dict[Key, set[Key]] = {}
        for place in places:
            group = self._groups.get(place.group)
            rows = {row for row in group.rows if row.place == place} if group else set[Key]()
            if group is None or not (rows or place in group.open):
                raise QueueError(f"place {place} cannot be dropped ({reason}): it is not reserved, or was dropped or consumed")
            gone[place] = rows
        crash_point("queue.before_drop")
        lost = {row for rows in gone.values() for row in rows}
        self._forget(lost)
        for place, rows in gone.items():
            group = self._groups[place.group]
            group.open.discard(place)
            group.rows -= rows
            self._drops[reason] += 1
            if not group.open and not group.rows:
                self._leave(place.group)
        crash_point("queue.after_drop")
        return lost

    def _leave(self, group: GroupKey) -> None:
        """It is gone for good."""
        del self._groups[group]
        self._waiting.pop(group, None)
        self._restored.discard(group)

    def _no_rows(self, columns: frozenset[str]) -> DataProto:
        """What a rank without rows reads: the columns as the queue's rows have them, of none."""
        for block in self._blocks.values():
            if columns <= block.columns:
                return block.select(()).only(columns)
        raise QueueError(f"no row in the queue has columns {sorted(columns)}, so that they cannot be read, not even of no row")

    def _check_known(self, keys: Iterable[Key], what: str) -> None:
        for key in keys:
            if key not in self._blocks:
                raise QueueError(f"{what}: row {key} is not in the queue (never put, dropped or consumed)")

    def _blocks_of(self, keys: Iterable[Key]) -> list[DataProto]:
        """The blocks that hold these rows, each once, in the order of `keys`."""
        return list({id(block): block for block in (self._blocks[key] for key in keys)}.values())

    @property
    def blocks(self) -> list[DataProto]:
        """All rows, each in one block."""
        return self._blocks_of(self._blocks)

    def store(self, blocks: Iterable[DataProto]) -> None:
        """Rows that are there are these from now on, with the same columns."""
        self._blocks.update({key: block for block in blocks for key in block.keys})

    def _forget(self, keys: set[Key]) -> None:
        for block in self._blocks_of(keys):
            self._cut(block, keys)
        for key in keys:
            del self._blocks[key]

    def _cut(self, block: DataProto, gone: Collection[Key]) -> None:
        """Of a block that loses rows, the others: group by group, so that a block is cut once however many groups it holds."""
        if all(key in gone for key in block.keys):
            return
        runs = [len(list(run)) for _, run in groupby(block.keys, key=lambda key: key.group)]
        for part in block.split(runs):
            if rest := [key for key in part.keys if key not in gone]:
                self.store([part.by_keys(rest)])

    def _gather(self, keys: Sequence[Key], columns: frozenset[str]) -> DataProto:
        """Shares the block's memory where `keys` are consecutive rows of one block; copies otherwise."""
        found: dict[int, tuple[DataProto, list[Key]]] = {}
        for key in keys:
            block = self._blocks[key]
            found.setdefault(id(block), (block, []))[1].append(key)
        parts = [block.by_keys(its).only(columns) for block, its in found.values()]
        return (parts[0] if len(parts) == 1 else DataProto.concat(parts, self._join)).by_keys(keys)

    # --------------------------------------------------------------------------------------------- leases

    def fence(self, consumer: Consumer) -> None:
        """Voids the leases of older incarnations of this consumer. Raises QueueError for one that is itself older."""
        newest = self._fences.get(consumer.name)
        if newest == consumer.incarnation:
            return
        if newest is not None and consumer.incarnation < newest:
            raise QueueError(
                f"consumer {consumer.name!r} of incarnation {consumer.incarnation} may not take: incarnation {newest} took over"
            )
        self._fences[consumer.name] = consumer.incarnation
        for lease in list(self._leases.values()):
            if lease.consumer.name == consumer.name and lease.consumer.incarnation < consumer.incarnation:
                self._release(lease)

    def lease(self, consumer: Consumer, columns: frozenset[str], n: int, window: int) -> Lease | None:
        """The `n` oldest whole groups that have `columns`, or None while there are not so many."""
        ready = self._ready(columns, n, window)
        return None if ready is None else self._leased(consumer, ready)

    def lend(self, consumer: Consumer, columns: frozenset[str], lacking: frozenset[str], n: int) -> Lease | None:
        """The oldest whole groups, at most `n`, that have `columns` and lack some of `lacking`, or None while there is none."""
        ready = (
            key
            for key, group in self._waiting.items()
            if group.lease is None and self._complete(group, columns) and not self._complete(group, lacking)
        )
        found = set(islice(ready, n))
        return self._leased(consumer, found, lent=True) if found else None

    def _leased(self, consumer: Consumer, ready: set[GroupKey], *, lent: bool = False) -> Lease:
        keys = sorted(key for group in ready for key in self._groups[group].rows)
        blocks = self._blocks_of(keys)
        common = frozenset[str].intersection(*(block.columns for block in blocks))
        rows = self._gather(keys, common)
        if all(block.columns == common for block in blocks):
            taken = set(keys)
            for block in blocks:
                self._cut(block, taken)
            self.store([rows])  # from here on, reading the lease's rows copies nothing
        crash_point("queue.before_take")
        lease = Lease(self._next_lease, consumer, rows.ref(), lent)
        self._next_lease += 1
        self._leases[lease.id] = lease
        for group in ready:
            self._groups[group].lease = lease.id
            if not lent:
                del self._waiting[group]
        crash_point("queue.after_take")
        return lease

    def _ready(self, columns: frozenset[str], n: int, window: int) -> set[GroupKey] | None:
        ready: set[GroupKey] = set()
        passed = 0
        for key, group in self._waiting.items():
            if group.lease is None and self._complete(group, columns):
                ready.add(key)
                if len(ready) == n:
                    return ready
            else:
                passed += 1
                if passed > window:
                    return None
        return None

    def _complete(self, group: _Group, columns: frozenset[str]) -> bool:
        return not group.open and all(columns <= block.columns for block in self._blocks_of(group.rows))

    def release(self, lease: Lease) -> None:
        self._check_held(lease)
        crash_point("queue.before_release")
        self._release(lease)
        crash_point("queue.after_release")

    def ack(self, lease: Lease) -> set[Key]:
        """Returns the rows that are gone."""
        self._check_held(lease)
        crash_point("queue.before_ack")
        groups = self._held(lease)
        gone = {row for key in groups for row in self._groups[key].rows}
        self._forget(gone)
        for key in groups:
            self._leave(key)
        del self._leases[lease.id]
        crash_point("queue.after_ack")
        return gone

    def _held(self, lease: Lease) -> list[GroupKey]:
        """Its groups, without those of which all rows were dropped since."""
        return [key for key in lease.ref.groups if key in self._groups]

    def _check_held(self, lease: Lease) -> None:
        if self._leases.get(lease.id) != lease:
            raise QueueError(
                f"lease {lease.id} of consumer {lease.consumer.name!r} (incarnation {lease.consumer.incarnation}) is void: "
                f"it was acknowledged or released before, a newer incarnation took over, or the queue was restored"
            )

    def _release(self, lease: Lease) -> None:
        del self._leases[lease.id]
        for key in self._held(lease):
            self._groups[key].lease = None
        if not lease.lent:
            self._wait_again()

    def _wait_again(self) -> None:
        lent = {lease.id for lease in self._leases.values() if lease.lent}
        self._waiting = {key: group for key, group in self._groups.items() if group.lease is None or group.lease in lent}

    # -------------------------------------------------------------------------------------------- looking

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def __contains__(self, group: GroupKey) -> bool:
        return group in self._groups

    @property
    def last(self) -> Mapping[str, int]:
        """Space -> the highest ordinal that was ever reserved."""
        return self._last

    def pass_over(self, last: Mapping[str, int]) -> None:
        """Groups up to these ordinals were reserved once."""
        for space, ordinal in last.items():
            self._last[space] = max(ordinal, self._last.get(space, -1))

    def count(self, drops: Mapping[str, int]) -> None:
        """Rows that were dropped before they were here, by reason."""
        self._drops.update(drops)

    def filled(self, group: GroupKey) -> set[Key]:
        """The places of a group that have rows."""
        return {row.place for row in self._groups[group].rows} if group in self._groups else set()

    def describe(self, columns: frozenset[str]) -> str:
        """What a consumer that waits for `columns` has before it, for an error message."""
        free = {key: group for key, group in self._groups.items() if group.lease is None}
        unfilled = [f"{key} ({len(group.open)} places open)" for key, group in free.items() if group.open]
        incomplete = {
            key: columns - frozenset[str].intersection(*(self._blocks[row].columns for row in group.rows))
            for key, group in free.items()
            if not group.open and not self._complete(group, columns)
        }
        lacking = [f"{key} (without {', '.join(sorted(names))})" for key, names in incomplete.items()]
        parts = [f"{len(free) - len(unfilled) - len(lacking)} groups are complete", f"{len(self._groups) - len(free)} leased"]
        for label, names in (("not filled", unfilled), ("without columns", lacking)):
            if names:
                parts.append(f"{len(names)} {label}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
        return "; ".join(parts)

    def metrics(self) -> Metrics:
        """age: versions between the oldest and the newest policy that sampled what is there; policies: how many there are."""
        blocks = self.blocks
        drops, self._drops = self._drops, Counter()
        runs = {runs for block in blocks for runs in block.non_tensor_batch.get("policy", ())}
        policies = {policy for each in runs for policy, _ in each}
        versions = [policy.version for policy in policies]
        depth = {
            "groups": len(self._groups),
            "rows": len(self._blocks),
            "open_places": sum(len(group.open) for group in self._groups.values()),
            "bytes": sum(tensor.nbytes for block in blocks for tensor in block.batch.values()),
            "policies": len(policies),
            "age": max(versions, default=0) - min(versions, default=0),
        }
        return Metrics.mean(depth) + Metrics.sum({f"dropped/{reason}": count for reason, count in drops.items()})

    # ------------------------------------------------------------------------------------------ snapshots

    def save(self, directory: Path) -> None:
        """One file a block and `queue.json`; leases are not saved, so their rows count as not acknowledged."""
        crash_point("queue.before_save")
        directory.mkdir(parents=True, exist_ok=True)
        blocks = self.blocks
        for i, block in enumerate(blocks):
            block.save(directory / f"rows-{i:05d}.pt")
        crash_point("queue.in_save")
        state = {
            "format": _FORMAT,
            "blocks": len(blocks),
            "groups": [
                {"space": key.space, "ordinal": key.ordinal, "open": [str(place) for place in sorted(group.open)]}
                for key, group in self._groups.items()
            ],
            "last": self._last,
            "next_lease": self._next_lease,
            "fences": self._fences,
            "drops": self._drops,
        }
        (directory / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        crash_point("queue.after_save")

    def offer_again(self) -> None:
        """Whoever fills the groups that are there may be new, and reserve them once more."""
        self._restored = set(self._groups)

    def restore(self, directory: Path) -> None:
        try:
            state = cast("dict[str, Any]", json.loads((directory / _STATE).read_text(encoding="utf-8")))
            if state["format"] != _FORMAT:
                raise SnapshotError(f"{directory / _STATE} has format {state['format']}, this version reads {_FORMAT}")
            blocks = [DataProto.load(directory / f"rows-{i:05d}.pt") for i in range(state["blocks"])]
        except (OSError, ValueError, KeyError) as problem:
            if isinstance(problem, SnapshotError):
                raise
            raise SnapshotError(f"the queue cannot be restored from {directory}: {problem}; use an older snapshot") from problem
        crash_point("queue.before_restore")
        self._groups = {
            GroupKey(saved["space"], saved["ordinal"]): _Group({Key.parse(text) for text in saved["open"]})
            for saved in state["groups"]
        }
        self._blocks = {}
        self.store(blocks)
        for key in self._blocks:
            self._groups[key.group].rows.add(key)
        self._waiting = dict(self._groups)
        self.offer_again()
        self._leases = {}
        self._next_lease = max(self._next_lease, state["next_lease"])
        self._last = state["last"]
        self._fences = state["fences"]
        self._drops = Counter(cast("Mapping[str, int]", state["drops"]))
        crash_point("queue.after_restore")
