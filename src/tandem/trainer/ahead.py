"""Stages that need not wait for the batch: each runs on groups as they are complete, while others are still sampled.

    a group is put -> lent to a stage that it lacks columns of -> columns written -> given back -> offered to the update

It is not in the way of anything: what it gives is what a stage would have given with the whole batch before it, and a restored
queue lends the groups again that lack a column.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tandem.errors import StalledError
from tandem.ports import Consumer, TransferQueue
from tandem.trainer.plan import BatchStage, checked
from tandem.types import Metrics


async def run_ahead(
    stage: BatchStage, queue: TransferQueue, incarnation: int, most: int, report: Callable[[Metrics], None]
) -> None:
    """Until it is cancelled: all groups that lack what the stage gives, at most so many at a time, and their metrics to `report`.

    Groups that come while the stage runs are taken together after it. Raises what the stage does.
    """
    consumer = Consumer(f"stage {stage.name}", incarnation)
    while True:
        try:
            lease = await queue.take(consumer, stage.needs, most, lacking=stage.gives)
        except StalledError:  # that nothing lacks its columns is in order; whoever waits for them says what is stuck
            await asyncio.sleep(0)
            continue
        report((await checked(stage, lease.ref))[1])
        await queue.release(lease)
