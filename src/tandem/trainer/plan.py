"""The pipeline between a batch and its update, derived from columns: who needs what decides which stages run.

    plan(needs={"advantages"}, have={"tokens", "mask", "rewards"}, stages)  ->  advantages

It is not a scheduler: a plan gives every stage the whole batch, one after the other. What need not wait for the batch is split
off (`Plan.split`), for a source to run ahead.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tandem.errors import PlanError
from tandem.types import BatchRef, Metrics, Stage

BatchStage = Stage[BatchRef]
"""A stage that is given a handle: it reads its columns from the queue, writes what it gives, and returns the new handle."""


@dataclass(frozen=True)
class Plan:
    """Stages in an order in which each finds what it needs.

    reads: the columns that a batch brings along and that a stage or the update reads.
    """

    stages: tuple[BatchStage, ...]
    reads: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return " -> ".join(stage.name for stage in self.stages) or "nothing"

    @property
    def gives(self) -> frozenset[str]:
        return frozenset[str]().union(*(stage.gives for stage in self.stages))

    def split(self) -> tuple[Plan, Plan]:
        """The stages that can run on each group by itself, before the batch is whole, and the rest.

        The former have scope row or group, run no model or a frozen one, and need what rows bring along or another of them gives.
        """
        known, ahead = set(self.reads), list[BatchStage]()
        for stage in self.stages:
            if stage.scope != "batch" and stage.weights != "current" and stage.needs <= known:
                ahead.append(stage)
                known |= stage.gives
        return replace(self, stages=tuple(ahead)), replace(self, stages=tuple(s for s in self.stages if s not in ahead))

    async def run(self, batch: BatchRef) -> Metrics:
        """Runs the stages on this batch. Raises PlanError for a stage that did not give what it promised."""
        metrics = Metrics()
        for stage in self.stages:
            batch, measured = await checked(stage, batch)
            metrics += measured
        return metrics


NOTHING = Plan(())


async def checked(stage: BatchStage, batch: BatchRef) -> tuple[BatchRef, Metrics]:
    """Runs a stage, with the time that it took. Raises PlanError where it did not give what it promised."""
    began_s = time.perf_counter()
    batch, measured = await stage.run(batch)
    if missing := stage.gives - batch.columns:
        raise PlanError(f"stage {stage.name!r} promised {sorted(stage.gives)} and did not give {sorted(missing)}")
    return batch, measured + Metrics.sum({f"time/stage_{stage.name}_s": time.perf_counter() - began_s})


def plan(needs: Collection[str], have: Collection[str], stages: Sequence[BatchStage]) -> Plan:
    """The stages that lead from the columns `have` to the columns `needs`, and no others.

    Walks needed columns backwards; of stages that do not depend on each other, the order is that of the columns' names.
    Raises PlanError for a column that no stage gives, that two stages give, or that needs itself.
    """
    ordered: list[BatchStage] = []
    reads: set[str] = set()

    def want(column: str, chain: tuple[str, ...]) -> None:
        if column in have:
            reads.add(column)
            return
        if any(column in stage.gives for stage in ordered):
            return
        path = " <- ".join((repr(column), *reversed(chain)))
        givers = [stage for stage in stages if column in stage.gives]
        if not givers:
            known = sorted(set(have).union(*(stage.gives for stage in stages)))
            raise PlanError(
                f"no stage gives column {column!r} ({path}); there are {', '.join(known)}: add the stage or leave out its user"
            )
        if len(givers) > 1:
            raise PlanError(f"column {column!r} ({path}) is given by stages {', '.join(stage.name for stage in givers)}: leave one")
        if givers[0].name in chain:
            raise PlanError(f"stage {givers[0].name!r} needs what it gives itself: {path}")
        for need in sorted(givers[0].needs):
            want(need, (*chain, givers[0].name))
        ordered.append(givers[0])

    for column in sorted(needs):
        want(column, ("update",))
    return Plan(tuple(ordered), frozenset(reads))
