"""Law 11: every wait is for progress and has a name; when nothing moves for its limit, the error says who waited for what and
shows where they stand.

Here for the waits of the queue and of a call on worker processes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.data_proto import DataProto
from tandem.device import Hardware
from tandem.errors import StalledError
from tandem.ports import Consumer
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.runtime.placement import ResourcePool, place
from tandem.runtime.pool import Pool, PoolGroup
from tandem.runtime.process import Processes
from tandem.types import GroupKey, Key
from tests.laws.breaking import Breaker
from tests.runtime.workers import Worker


def row(ordinal: int, member: int) -> DataProto:
    return DataProto.make([Key("train", ordinal, member)], [1], token={"tokens": torch.zeros(1)})


def check_a_queue_waits_while_something_moves_and_then_says_who_waited_for_what() -> None:
    async def scenario() -> None:
        queue = MemoryQueue(QueueConfig(stall_limit_s=0.5))
        await queue.reserve(GroupKey("train", 0), 4)
        taking = asyncio.ensure_future(queue.take(Consumer("learner"), frozenset({"tokens"}), 1))
        for member in range(4):  # 0.8 s in all
            await asyncio.sleep(0.2)
            await queue.put(row(0, member))
        assert len((await taking).ref.keys) == 4
        await queue.reserve(GroupKey("train", 1), 2)
        stuck = asyncio.create_task(asyncio.Event().wait(), name="somebody stuck")
        with pytest.raises(StalledError) as stalled:
            await queue.take(Consumer("learner"), frozenset({"tokens"}), 1)
        stuck.cancel()
        for words in ("'learner'", "1 whole groups", "tokens", "0.5 s", "train:1 (2 places open)", "somebody stuck", "await fut"):
            assert words in str(stalled.value)

    asyncio.run(scenario())


def check_a_call_waits_while_ranks_answer_and_then_shows_where_the_others_stand() -> None:
    async def call(group: PoolGroup, *arguments: Any) -> BaseException | None:
        """What it raised; a wait without a limit is no test without an end."""
        calling = asyncio.ensure_future(group.call(*arguments))
        await asyncio.wait({calling}, timeout=5)
        assert not calling.cancel(), "the call waits on"
        return calling.exception()

    async def scenario(logs: Path) -> None:
        runtime = Processes(place([ResourcePool("pool", 3)], Hardware(cores=3)), logs, limit_s=1.0)
        group = runtime.group("policy", "pool", "tests.runtime.workers:Worker")
        async with runtime:
            assert await call(group, Worker.sleep_by_rank, 0.6) is None  # 1.2 s in all
            error = await call(group, Worker.sleep, 60.0, 1)
            assert isinstance(error, StalledError)
            for words in ("policy.sleep", "1 s", "1 of 3 ranks", "rank 1 (process", "time.sleep(seconds)"):
                assert words in str(error)

    with tempfile.TemporaryDirectory() as logs:
        asyncio.run(scenario(Path(logs)))


CHECKS = [
    check_a_queue_waits_while_something_moves_and_then_says_who_waited_for_what,
    check_a_call_waits_while_ranks_answer_and_then_shows_where_the_others_stand,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_wait_has_an_end_and_a_name(check: Callable[[], None]) -> None:
    check()


# ---------------------------------------------------------------------------------------------------- breakers


async def _wait_by_the_clock(
    self: MemoryQueue, call: str, look: Callable[[], Any], who: Callable[[], str], columns: Any = frozenset()
) -> Any:
    """A limit for the whole wait, whatever moves meanwhile."""
    try:
        async with asyncio.timeout(self._config.stall_limit_s):
            while (found := look()) is None:
                await self._next_change.wait()
    except TimeoutError:
        raise StalledError(who()) from None
    return found


async def _nameless(
    self: MemoryQueue, call: str, look: Callable[[], Any], who: Callable[[], str], columns: Any = frozenset()
) -> Any:
    return await _WAIT(self, call, look, lambda: "somebody waits", columns)


async def _without_stacks(self: Pool[Any], what: str, waiting: Sequence[Any]) -> StalledError:
    await self.end(f"{what} stalled")
    return StalledError(f"{what}: nothing moved for {self._limit_s:g} s; {len(waiting)} of {len(self)} ranks have not answered")


async def _collect_for_ever(self: Pool[Any], what: str, answers: Sequence[asyncio.Future[Any]], *, stuck: bool) -> list[Any]:
    return await asyncio.gather(*answers)


async def _collect_by_the_clock(self: Pool[Any], what: str, answers: Sequence[asyncio.Future[Any]], *, stuck: bool) -> list[Any]:
    _, pending = await asyncio.wait(answers, timeout=self._limit_s)
    waiting = [process for process, answer in zip(self._members, answers, strict=True) if answer in pending]
    if waiting:
        raise await self._stalled(what, waiting)
    return [answer.result() for answer in answers]


_WAIT = MemoryQueue._wait
_QUEUE, _CALL = CHECKS

BREAKERS = [
    Breaker(11, "queue-by-the-clock", "tandem.queue.memory:MemoryQueue._wait", _wait_by_the_clock, _QUEUE),
    Breaker(11, "queue-without-a-name", "tandem.queue.memory:MemoryQueue._wait", _nameless, _QUEUE),
    Breaker(11, "queue-without-stacks", "tandem.stacks:of_tasks", str, _QUEUE),
    Breaker(11, "call-without-stacks", "tandem.runtime.process:Pool._stalled", _without_stacks, _CALL),
    Breaker(11, "call-without-a-limit", "tandem.runtime.process:Pool._collect", _collect_for_ever, _CALL),
    Breaker(11, "call-by-the-clock", "tandem.runtime.process:Pool._collect", _collect_by_the_clock, _CALL),
]
