"""Trainer modes as values: how rollouts and training share hardware and how old a sample may be. Not code paths.

Legend: n groups a step, k staleness budget in versions, v versions finished since the run began, so that step v trains
on the batch that makes version v + 1. A group's age is v at its consumption less v at its admission.

In flight. The gate admits while admitted - returned < (v + k + 1) n, and v n groups have been consumed, so at most
(k + 1) n groups are admitted and not yet consumed or returned.

Worst age. Number the groups that are never returned in admission order from 1. A group admitted at v = a has a number
r <= (a + k + 1) n. In strict order step v consumes numbers v n + 1 to (v + 1) n, so that group is consumed at
v = ceil(r / n) - 1 <= a + k: its age is at most k. Its tokens are sampled after its admission, so none is older.
In any looser order a straggler could be passed over at every step and its age would have no bound; hence window = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.errors import ConfigError

Mode = Literal["sync", "colocate_async", "separate_async"]
Placement = Literal["colocated", "separate"]


@dataclass(frozen=True)
class Schedule:
    """placement: whether rollout and training take turns on the same devices. staleness: k.
    interrupt: new weights reach running episodes.
    """

    mode: Mode
    placement: Placement
    staleness: int
    interrupt: bool

    @property
    def window(self) -> int:
        """How many unfinished groups older than a consumed one may be passed over."""
        return 0

    @property
    def worst_age(self) -> int:
        """Versions between a token's policy and the policy that is trained on it, at most."""
        return self.staleness

    def in_flight(self, groups_per_step: int) -> int:
        """Groups admitted and not yet consumed, at most: the room that a queue needs."""
        return (self.staleness + 1) * groups_per_step

    def check_runnable(self, *, one_process: bool) -> None:
        """Raises ConfigError for a mode that the runtime cannot give. one_process: that rollout and training share."""
        if self.placement == "separate" and one_process:
            raise ConfigError(
                f"trainer.mode={self.mode} trains and generates at the same time, which one process cannot: add runtime=process, "
                f"or use trainer.mode=colocate_async, where they take turns"
            )


def schedule(mode: Mode, staleness: int | None = None) -> Schedule:
    """The value of a mode; staleness None is its default. Raises ConfigError for a staleness that contradicts it."""
    if mode == "sync":
        if staleness not in (None, 0):
            raise ConfigError(f"trainer.staleness={staleness} contradicts trainer.mode=sync, where it is 0; leave it out")
        return Schedule(mode, "colocated", staleness=0, interrupt=False)
    k = 1 if staleness is None else staleness
    if k < 1:
        raise ConfigError(
            f"trainer.staleness={k} contradicts trainer.mode={mode}, where it is at least 1; for 0 use trainer.mode=sync"
        )
    return Schedule(mode, "separate" if mode == "separate_async" else "colocated", staleness=k, interrupt=True)
