"""The objective on tasks that nothing is trained on: the loss of every dataset's objective, and what it measures beside.

The tasks become rows, pass through the stages of the plan and through the engine that trains, and are dropped again.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.data_proto import DataProto
from tandem.ports import Dataset, TransferQueue, WorkerGroup
from tandem.trainer.dataset import RowMaker, task_rows
from tandem.trainer.plan import Plan
from tandem.trainer.workers import TrainWorker
from tandem.types import GroupKey, Metric, Metrics, PolicyRef, Unit


class HeldOutLoss:
    """`measure` gives `eval/loss`, whose mean is over all tasks as if they were one optimiser step.

    tasks: how many are taken, from the first, no more than there are. unit: what stays together where rows are split over ranks.
    """

    def __init__(
        self,
        *,
        dataset: Dataset,
        maker: RowMaker,
        tasks: int,
        queue: TransferQueue,
        plan: Plan,
        workers: WorkerGroup,
        unit: Unit,
    ) -> None:
        """Raises DataError where a task has not what the objective is about."""
        self.dataset, self._maker, self._tasks = dataset, maker, tasks
        self._queue, self._plan, self._workers, self._unit = queue, plan, workers, unit
        self._rows(PolicyRef())

    async def measure(self, policy: PolicyRef) -> Metrics:
        """As `eval/...`, of the weights that are `policy`'s; the rows' keys have its name, so that none comes twice."""
        rows = self._rows(policy)
        for group in rows.ref().groups:
            await self._queue.reserve(group, self._maker.places)
        await self._queue.put(rows)
        batch = replace(rows.ref(), unit=self._unit)
        try:
            await self._plan.run(batch)
            await self._workers.call(TrainWorker.weigh, batch)
            metrics = await self._workers.call(TrainWorker.evaluate, batch)
        finally:
            await self._queue.drop(rows.keys, "held_out")
        return metrics + Metrics({"eval/n": Metric(self._tasks, reduction="sum")})

    def _rows(self, policy: PolicyRef) -> DataProto:
        space = f"heldout {policy}"
        return DataProto.concat([task_rows(self.dataset, i, self._maker, GroupKey(space, i)) for i in range(self._tasks)])
