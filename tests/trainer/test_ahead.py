"""Stages that run while groups are still sampled: when, on what, and what is left of them after a crash or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.agents.single_turn import SingleTurn
from tandem.data_proto import DataProto
from tandem.errors import EngineError, PlanError
from tandem.ports import LLM
from tandem.queue.fake import FakeQueue
from tandem.queue.memory import MemoryQueue
from tandem.trainer.ahead import run_ahead
from tandem.trainer.plan import BatchStage
from tandem.trainer.source import RolloutConfig
from tandem.types import BatchRef, Episode, GroupKey, Key, Metrics, Stage, Task
from tests.trainer.world import World, world

SMALL = RolloutConfig(groups_per_step=2, group_size=3)
GIVES = frozenset({"ref_logprobs"})


def reference(before: Callable[[BatchRef], Awaitable[None]], *, honest: bool = True) -> Callable[[MemoryQueue], BatchStage]:
    """A stage whose column says how many rows its group has. before: what it does first."""

    def made(queue: MemoryQueue) -> BatchStage:
        async def run(batch: BatchRef) -> tuple[BatchRef, Metrics]:
            await before(batch)
            rows = await queue.get(batch.keys, frozenset({"tokens"}))
            column = torch.full((rows.num_tokens,), float(sum(key.group == batch.keys[0].group for key in batch.keys)))
            await queue.write(DataProto.make(rows.keys, rows.lengths, token={"ref_logprobs": column}))
            return replace(batch, columns=batch.columns | (GIVES if honest else set[str]())), Metrics.sum(
                {"reference/rows": len(rows)}
            )

        return Stage("reference", frozenset({"tokens"}), GIVES, run, "row", "frozen")

    return made


async def first_batch(made: World) -> tuple[BatchRef, DataProto]:
    async with aclosing(aiter(made.source)) as batches:
        batch = await anext(batches)
        return batch, await made.queue.get(batch.keys, GIVES)


def test_it_runs_on_a_group_while_another_is_still_sampled() -> None:
    """Group 1 ends when the stage has seen group 0: with the whole batch it would wait for ever."""

    async def scenario() -> None:
        seen = asyncio.Event()

        async def waiting(task: Task, llm: LLM, key: Key) -> Episode:
            if key.ordinal == 1:
                await seen.wait()
            return await SingleTurn()(task, llm, key)

        async def notice(batch: BatchRef) -> None:
            seen.set()

        made = world(config=SMALL, agent=waiting, ahead=reference(notice))
        batch, rows = await first_batch(made)
        assert batch.columns >= GIVES
        assert rows["ref_logprobs"].eq(3).all()  # its groups came to it whole
        assert made.source._metrics["reference/rows"].value == 6  # each row once
        assert made.source._metrics["time/stage_reference_s"].value > 0

    asyncio.run(scenario())


async def put(queue: MemoryQueue, ordinal: int) -> None:
    await queue.reserve(GroupKey("train", ordinal), 2)
    keys = [Key("train", ordinal, member) for member in range(2)]
    await queue.put(DataProto.make(keys, [1, 1], token={"tokens": torch.zeros(2, dtype=torch.int64)}))


def test_groups_that_come_while_it_runs_are_taken_together_and_its_idleness_is_no_stall() -> None:
    """On a queue that never waits, so that each time that there is nothing to do it is told of a stall."""

    async def scenario() -> None:
        queue, going_on, taken = FakeQueue(), asyncio.Event(), list[int]()

        async def notice(batch: BatchRef) -> None:
            taken.append(len(batch.groups))
            await going_on.wait()

        running = asyncio.create_task(run_ahead(reference(notice)(queue), queue, 0, 3, lambda metrics: None))
        await asyncio.sleep(0.01)
        await put(queue, 0)
        while not taken:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for ordinal in range(1, 6):
            await put(queue, ordinal)
        going_on.set()
        while sum(taken) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert taken == [1, 3, 2]  # at most three at a time
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_the_update_is_offered_no_group_that_lacks_the_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage begins when the batch is there in all other respects."""

    async def scenario() -> None:
        async def late(*arguments: Any) -> None:
            while made.queue.metrics()["rows"].value < 2 * SMALL.group_size:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            await run_ahead(*arguments)

        monkeypatch.setattr("tandem.trainer.source.run_ahead", late)
        made = world(config=SMALL, ahead=reference(lambda batch: asyncio.sleep(0)))
        batch, _ = await first_batch(made)
        assert [group.ordinal for group in batch.groups] == [0, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize(("error", "match"), [(EngineError("out of memory"), "out of memory"), (None, "promised .*ref_logprobs")])
def test_what_goes_wrong_in_it_ends_the_run(error: Exception | None, match: str) -> None:
    async def fail(batch: BatchRef) -> None:
        if error is not None:
            raise error

    with pytest.raises(type(error) if error else PlanError, match=match):
        asyncio.run(first_batch(world(config=SMALL, ahead=reference(fail, honest=False))))


def test_rows_that_a_snapshot_holds_without_the_column_get_it_after_the_restore(tmp_path: Path) -> None:
    """Group 0 has the column, group 1 is with the stage when the process dies."""

    async def scenario() -> None:
        reached = asyncio.Event()

        async def stuck(batch: BatchRef) -> None:
            if batch.keys[-1].ordinal == 1:
                reached.set()
                await asyncio.sleep(60)

        async def second_later(task: Task, llm: LLM, key: Key) -> Episode:
            while key.ordinal == 1 and "reference/rows" not in first.source._metrics:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return await SingleTurn()(task, llm, key)

        first = world(config=SMALL, agent=second_later, ahead=reference(stuck))
        async with aclosing(aiter(first.source)) as batches:
            asking = asyncio.create_task(anext(batches))  # type: ignore[arg-type]
            await reached.wait()
            await first.queue.save(tmp_path)
            state = first.source.state()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        again: list[int] = []

        async def notice(batch: BatchRef) -> None:
            again.extend(group.ordinal for group in batch.groups)

        second = world(config=SMALL, ahead=reference(notice))
        await second.queue.restore("s", tmp_path)
        second.source.restore(state)
        batch, rows = await first_batch(second)
        assert again == [1]
        assert batch.columns >= GIVES
        assert rows["ref_logprobs"].eq(3).all()
        assert second.reward.judged == []

    asyncio.run(scenario())
