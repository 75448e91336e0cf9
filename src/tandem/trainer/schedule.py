"""Trainer modes as values: how rollouts and training share hardware and how old a sample may be. Not code paths.

Legend: n groups a step, k staleness budget in versions, s spare groups (sync only), v versions finished since the run began, so
that step v trains on the batch that makes version v + 1. A token's age is v at its consumption less the version that sampled it.

In flight. The gate admits while admitted - returned < (v + k + 1) n + s, and v n groups have been consumed, so at most
(k + 1) n + s groups are admitted and not yet consumed or returned.

Worst age, window = 0. Number the groups that are never returned in admission order from 1. A group admitted at v = a has a number
r <= (a + k + 1) n. In strict order step v consumes numbers v n + 1 to (v + 1) n, so that group is consumed at
v = ceil(r / n) - 1 <= a + k: its age is at most k. Its tokens are sampled after its admission, so none is older.

Worst age, window > 0. A straggler may be passed over at every step, so that its age has no bound by itself: `too_old` says what
becomes of its tokens that are older than k when it is taken at last. A group that is dropped gives its slot back, and the one
that is admitted for it is of the current policy: while the policy stands still this ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.errors import ConfigError
from tandem.types import Algorithm

Mode = Literal["sync", "colocate_async", "separate_async"]
Placement = Literal["colocated", "separate"]
TooOld = Literal["mask", "drop", "correct"]


@dataclass(frozen=True)
class Schedule:
    """placement: whether rollout and training take turns on the same devices. staleness: k.
    interrupt: new weights reach running episodes. window: how many unfinished groups older than a taken one may be passed over.

    too_old: what becomes of tokens older than k: they are masked; their whole group is dropped; or they are trained on, and the
    algorithm's correction is all that there is ("correct"). None: strict order leaves none.
    """

    mode: Mode
    placement: Placement
    staleness: int
    interrupt: bool
    window: int = 0
    too_old: TooOld | None = None

    @property
    def worst_age(self) -> int | None:
        """Versions between a token's policy and the policy that is trained on it, at most; None where nothing bounds it."""
        return None if self.too_old == "correct" else self.staleness

    def in_flight(self, groups_per_step: int) -> int:
        """Groups admitted and not yet consumed, at most: the room that a queue needs, spare ones aside."""
        return (self.staleness + 1) * groups_per_step

    def check_runnable(self, *, one_process: bool) -> None:
        """Raises ConfigError for a mode that the runtime cannot give. one_process: that rollout and training share."""
        if self.placement == "separate" and one_process:
            raise ConfigError(
                f"trainer.mode={self.mode} trains and generates at the same time, which one process cannot: say runtime=process "
                f"instead of inline, or use trainer.mode=colocate_async, where they take turns"
            )

    def check_correction(self, algorithm: Algorithm) -> None:
        """Raises ConfigError where a correction is to be all that there is, and there is none."""
        if self.too_old == "correct" and not algorithm.params.get("correction"):
            raise ConfigError(
                f"trainer.too_old=correct trains on samples of any age, and {algorithm.name} does not correct for it: add "
                f"algorithm.correction=icepop, or another of `tandem algos`, or choose mask or drop"
            )

    def warning(self, algorithm: Algorithm) -> str | None:
        """What a user should hear of before the run."""
        if self.too_old == "correct":
            return f"trainer.too_old=correct: nothing bounds how old a sample is, and {algorithm.name} is left to correct for it"
        if self.staleness and not algorithm.params.get("correction"):
            return (
                f"samples may be older than the policy that they train, and {algorithm.name} does not correct for "
                f"it: consider algorithm.correction=icepop, or another of `tandem algos`"
            )
        return None

    def check_resumable(self, now: Schedule, directory: object) -> None:
        """Raises ConfigError where a run of this schedule may hold samples that `now` cannot train on."""
        loose = self.window > 0 and now.too_old is None
        if now.staleness < self.staleness or loose:
            also = f" trainer.window={self.window} trainer.too_old={self.too_old}" if loose else ""
            raise ConfigError(
                f"{directory} may hold samples that are {self.staleness} versions old{' or older' if loose else ''}, and "
                f"trainer.mode={now.mode} with staleness {now.staleness} cannot train on them: resume with "
                f"trainer.mode={self.mode} trainer.staleness={self.staleness}{also}, or more"
            )


def schedule(mode: Mode, staleness: int | None = None, window: int = 0, too_old: TooOld | None = None) -> Schedule:
    """The value of a mode; staleness None is its default. Raises ConfigError for values that contradict each other."""
    if window < 0:
        raise ConfigError(f"trainer.window must not be negative, got {window}")
    if mode == "sync":
        if staleness not in (None, 0):
            raise ConfigError(f"trainer.staleness={staleness} contradicts trainer.mode=sync, where it is 0; leave it out")
        if window or too_old is not None:
            raise ConfigError(
                f"trainer.window={window} and trainer.too_old={too_old} are of the asynchronous modes: in "
                f"trainer.mode=sync nothing is left for later; for a step that does not wait for "
                f"its slowest groups use rollout.spare_groups"
            )
        return Schedule(mode, "colocated", staleness=0, interrupt=False)
    k = 1 if staleness is None else staleness
    if k < 1:
        raise ConfigError(
            f"trainer.staleness={k} contradicts trainer.mode={mode}, where it is at least 1; for 0 use trainer.mode=sync"
        )
    if window and too_old is None:
        raise ConfigError(
            f"trainer.window={window} lets groups be passed over, so that they may become older than "
            f"trainer.staleness={k}: say what becomes of them, trainer.too_old=mask, drop or correct"
        )
    if too_old is not None and not window:
        raise ConfigError(
            f"trainer.too_old={too_old} without trainer.window: in strict order nothing is older than trainer.staleness={k}; "
            f"set trainer.window, or leave too_old out"
        )
    placement: Placement = "separate" if mode == "separate_async" else "colocated"
    return Schedule(mode, placement, k, interrupt=True, window=window, too_old=too_old)
