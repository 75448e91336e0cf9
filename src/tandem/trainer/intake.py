"""What every source keeps count of: the next admission, the gate, the policy, and the batch that is out on lease."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

from tandem.data_proto import DataProto
from tandem.errors import RunError, StalenessError
from tandem.ports import Consumer, Lease, TransferQueue
from tandem.trainer.gate import Gate
from tandem.trainer.schedule import Schedule
from tandem.trainer.staleness import Runs, by_length, histogram, too_old, without_old_tokens
from tandem.types import BatchRef, GroupKey, Json, Key, Metrics, PolicyRef

Forget = Callable[[Sequence[Key]], Awaitable[None]]


class Intake:
    """Admits groups of `space` into the queue and takes batches of `groups_per_step` out of it, one at a time.

    columns: what rows must have to be taken. spare: groups that are admitted beyond a step's own; as many unfinished ones may be
    passed over, and nothing is admitted from when a batch is taken until the next is asked for.

    The gate opens when a batch is asked for and not when the last one is trained on: in sync mode nothing is under way
    while a snapshot is written or the policy is evaluated.
    """

    def __init__(
        self,
        queue: TransferQueue,
        space: str,
        groups_per_step: int,
        schedule: Schedule,
        policy: PolicyRef,
        columns: frozenset[str] = frozenset({"tokens", "mask"}),
        *,
        spare: int = 0,
    ) -> None:
        self.policy = policy
        self._queue = queue
        self.space = space
        self._groups_per_step = groups_per_step
        self._schedule, self._columns = schedule, columns
        self._spare = spare
        self._gate = Gate(groups_per_step, schedule.staleness, policy.version, spare=spare)
        self._next = 0
        self._metrics = Metrics()  # of what was too old for the batch that is taken next, or is out
        self._lease: Lease | None = None

    @property
    def is_open(self) -> bool:
        """Whether `admit` would let a group in now."""
        return self._gate.is_open

    @property
    def num_admitted(self) -> int:
        return self._next

    def open(self) -> None:
        """A batch is asked for. Raises RunError where the last one was not given back with `advance`."""
        if self._lease is not None:
            raise RunError("a batch was asked for before advance() gave the last one back")
        self._gate.advance(self.policy.version)

    async def admit(self, places: int) -> tuple[GroupKey, tuple[Key, ...]]:
        """The next group, once the gate lets it in and its places are reserved, and those of them that are open: none where its
        rows came back with the queue. Nothing gives way after the reservation.
        """
        await self._gate.opened()
        group = GroupKey(self.space, self._next)
        places_open = await self._queue.reserve(group, places)
        self._gate.admit()
        self._next += 1
        return group, places_open

    def give_back(self) -> None:
        """A group was dropped: its slot is free."""
        self._gate.give_back()

    async def take(self, forget: Forget | None = None) -> Lease:
        """The next batch, in which no token is older than the schedule says; `forget` is given the rows of each group that is
        dropped for it, before it is.

        Groups that an earlier process finished after the snapshot that this one goes on from were admitted by its gate, and may
        be too old by this one's: they are dropped, too. Raises StalledError, by the queue's limit; StalenessError where strict
        order left an older one of this process, which is a fault.
        """
        consumer, now, worst = Consumer("learner", self.policy.incarnation), self.policy.version, self._schedule.worst_age
        window = self._schedule.window + self._spare
        while True:
            lease = await self._queue.take(consumer, self._columns, self._groups_per_step, window=window)
            old = [] if worst is None else too_old(lease.ref, now, worst)
            if old:
                self._metrics += by_length(lease.ref.lengths[row] for row in old)
            if old and self._schedule.too_old == "mask" and worst is not None:
                await self._mask(lease.ref.select(old), now, worst)
            elif old:
                for row in old:
                    self._check_came_back(lease.ref, row)
                await self._drop(lease, {lease.ref.keys[row].group for row in old}, forget)
                continue
            if self._spare:
                self._gate.close()
            return lease

    def _check_came_back(self, ref: BatchRef, row: int) -> None:
        """Of a row that is too old: it is to be dropped, or of an earlier process."""
        policy = ref.policies[row]
        if self._schedule.too_old != "drop" and policy is not None and policy.incarnation == self.policy.incarnation:
            raise StalenessError(
                f"row {ref.keys[row]} was sampled by {policy} and would be trained on by {self.policy}: its age is above "
                f"{self._schedule.worst_age}, the bound of mode {self._schedule.mode}"
            )

    async def _drop(self, lease: Lease, groups: set[GroupKey], forget: Forget | None) -> None:
        await self._queue.release(lease)
        for group in sorted(groups):
            rows = [key for key in lease.ref.keys if key.group == group]
            if forget is not None:
                await forget(rows)
            await self._queue.drop({key.place for key in rows}, "too_old")
            self._gate.give_back()
        self._metrics += Metrics.sum({"staleness/dropped_groups": len(groups)})

    async def _mask(self, ref: BatchRef, now: int, worst: int) -> None:
        rows = await self._queue.get(ref.keys, frozenset({"mask", "policy"}))
        mask = without_old_tokens(rows, now, worst)
        self._metrics += Metrics.sum({"staleness/masked_tokens": int(rows["mask"].sum() - mask.sum())})
        await self._queue.write(DataProto.make(rows.keys, rows.lengths, token={"mask": mask}))

    def hand_out(self, lease: Lease) -> BatchRef:
        self._lease = lease
        return lease.ref

    @property
    def leased(self) -> BatchRef:
        """The batch that is out. Raises RunError where there is none."""
        return self._out().ref

    async def advance(self, policy: PolicyRef) -> Metrics:
        """The batch was trained on and made `policy`. Raises RunError where there is none."""
        lease = self._out()
        metrics, self._metrics = self._metrics + await self._ages(lease.ref), Metrics()
        await self._queue.ack(lease)
        self._lease = None
        self.policy = policy
        return self._queue.metrics().prefixed("queue") + metrics

    async def _ages(self, ref: BatchRef) -> Metrics:
        """Of what was trained on: versions between the policy that sampled a token and the one trained."""
        runs: Sequence[Runs] = ()
        if "policy" in ref.columns:
            runs = (await self._queue.get(ref.keys, frozenset({"policy"}))).objects("policy")
        return histogram(ref.policies, runs, self.policy.version, self._schedule.staleness + 1)

    def _out(self) -> Lease:
        if self._lease is None:
            raise RunError("advance() without a batch: it goes with one that the source gave")
        return self._lease

    def state(self) -> dict[str, Json]:
        policy: list[Json] = [self.policy.name, self.policy.incarnation, self.policy.version]
        return {"policy": policy, "next": self._next, "gate": self._gate.state()}

    def restore(self, state: Mapping[str, Json]) -> None:
        """The policy comes back as a new incarnation, so that what an older process left behind is told apart."""
        name, incarnation, version = cast("tuple[str, int, int]", state["policy"])
        self.policy = PolicyRef(name, incarnation + 1, version)
        self._next = cast("int", state["next"])
        self._gate.restore(cast("Mapping[str, Json]", state["gate"]), version)
