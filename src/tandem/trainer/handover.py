"""One device for training and rollout, which take turns on it: the hand-over, and the account of what lies there meanwhile.

    to training   rollouts pause, and leave (caches, weights of their own) -> trainers come
    to rollout    trainers leave (optimiser state, weights that no rollout reads in place) -> rollouts come, and resume

Who leaves has left before anybody comes, so that there never is more on the device than before or after. Frozen models are no part
of it: they stay where they are. Nor is memory that a library keeps though it was freed (CUDA's caching allocator), which the same
process uses again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Literal

from tandem.errors import EngineError
from tandem.ports import Place, RolloutEngine, WorkerGroup
from tandem.trainer.workers import ModelWorker

Side = Literal["training", "rollout"]


class Ledger:
    """Bytes on the device during one hand-over. held: of each owner now, by what they are. totals: before, and after each move."""

    def __init__(self, held: Mapping[str, Mapping[str, int]]) -> None:
        self.held = dict(held)
        self.totals = [self._total()]

    def note(self, owner: str, held: Mapping[str, int]) -> None:
        """What an owner has there since it moved."""
        self.held[owner] = held
        self.totals.append(self._total())

    @property
    def before(self) -> int:
        return self.totals[0]

    @property
    def after(self) -> int:
        return self.totals[-1]

    @property
    def peak(self) -> int:
        return max(self.totals)

    def check(self, left: Mapping[str, frozenset[str]]) -> None:
        """left: who has left, and what may be there of it. Raises EngineError for anything else, and for a peak above both ends."""
        for owner, kept in left.items():
            if stuck := {what: size for what, size in self.held[owner].items() if size and what not in kept}:
                parts = ", ".join(f"{size} bytes of {what}" for what, size in stuck.items())
                raise EngineError(f"{owner} was sent to the host, and left {parts} on the device: look at its `place`")
        if self.peak > (most := max(self.before, self.after)):
            raise EngineError(f"a hand-over held {self.peak} bytes on the device at once, and {most} at its ends: {self.totals}")

    def _total(self) -> int:
        return sum(size for sizes in self.held.values() for size in sizes.values())


async def hand_over(
    side: Side, trainers: Mapping[str, WorkerGroup], rollouts: Sequence[RolloutEngine], *, lent: Collection[str]
) -> Ledger:
    """The device is that side's when this returns: its engines are there, and rollouts run; the others stand still, on the host.

    trainers: by role. lent: roles whose weights rollouts read where they are, so that they stay. Raises EngineError where a trainer
    has a gradient pending, and as `Ledger.check` does.
    """
    engines = {f"rollout engine {number}": engine for number, engine in enumerate(rollouts)}
    places = {role: partial(_place, group, weights=role not in lent) for role, group in trainers.items()}
    places |= {name: engine.place for name, engine in engines.items()}
    leaving, coming = (engines, trainers) if side == "training" else (trainers, engines)
    if side == "training":
        for engine in rollouts:
            await engine.pause()
    ledger = Ledger({name: await places[name]("device" if name in leaving else "host") for name in places})  # where each is already
    for name in leaving:
        ledger.note(name, await places[name]("host"))
    for name in coming:
        ledger.note(name, await places[name]("device"))
    ledger.check({name: frozenset({"weights"} if name in lent else ()) for name in leaving})
    if side == "rollout":
        for engine in rollouts:
            await engine.resume()
    return ledger


async def _place(group: WorkerGroup, where: Place, *, weights: bool) -> Mapping[str, int]:
    """What all ranks have on the device then."""
    found = Counter[str]()
    for held in await group.call_each(ModelWorker.place, where, weights):
        found.update(held)
    return found
