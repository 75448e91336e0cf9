"""What every source keeps count of: the next admission, the gate, the policy, and the batch that is out on lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from tandem.errors import RunError, StalenessError
from tandem.ports import Consumer, Lease, TransferQueue
from tandem.trainer.gate import Gate
from tandem.trainer.schedule import Schedule
from tandem.types import BatchRef, GroupKey, Json, Metrics, PolicyRef


class Intake:
    """Admits groups of `space` into the queue and takes batches of `groups_per_step` out of it, one at a time.

    columns: what rows must have to be taken.

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
    ) -> None:
        self.policy = policy
        self._queue = queue
        self.space = space
        self._groups_per_step = groups_per_step
        self._schedule, self._columns = schedule, columns
        self._gate = Gate(groups_per_step, schedule.staleness, policy.version)
        self._next = 0
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

    async def admit(self, places: int) -> GroupKey:
        """The next group, once the gate lets it in and its places are reserved. Nothing gives way after the reservation."""
        await self._gate.opened()
        group = GroupKey(self.space, self._next)
        await self._queue.reserve(group, places)
        self._gate.admit()
        self._next += 1
        return group

    def give_back(self) -> None:
        """A group was dropped: its slot is free."""
        self._gate.give_back()

    async def take(self) -> Lease:
        """The next batch. Raises StalledError, by the queue's limit, or StalenessError."""
        consumer = Consumer("learner", self.policy.incarnation)
        lease = await self._queue.take(consumer, self._columns, self._groups_per_step, window=self._schedule.window)
        for key, policy in zip(lease.ref.keys, lease.ref.policies, strict=True):
            if policy is not None and self.policy.version - policy.version > self._schedule.worst_age:
                raise StalenessError(
                    f"row {key} was sampled by {policy} and would be trained on by {self.policy}: "
                    f"its age is above {self._schedule.worst_age}, the bound of mode {self._schedule.mode}"
                )
        return lease

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
        await self._queue.ack(lease)
        ages = [self.policy.version - sampler.version for sampler in lease.ref.policies if sampler is not None]
        self._lease = None
        self.policy = policy
        return self._queue.metrics().prefixed("queue") + self._staleness(ages)

    def _staleness(self, ages: Sequence[int]) -> Metrics:
        """Of the rows that were trained on: versions between the oldest policy that sampled in a row and the one trained."""
        if not ages:
            return Metrics()
        counts = {f"rows_of_age_{age}": ages.count(age) for age in range(self._schedule.worst_age + 1)}
        return (Metrics.sum(counts) + Metrics.mean({"mean": sum(ages) / len(ages)}, len(ages))).prefixed("staleness")

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
