"""Running one episode: the supervised edge around an agent, shared by training and evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from tandem.errors import ColumnError, DataError, TandemError
from tandem.faults import crash_point
from tandem.ports import LLM, AgentLoop
from tandem.types import Episode, Key, Task

RAISED = "correct the reward; `tandem reward check` calls it without a run"
"""What to do where it raises for every episode."""


async def run_episode(agent: AgentLoop, task: Task, llm: LLM, key: Key) -> Episode:
    """The agent's episode; what the agent (its tools, its environment) raises becomes an episode that stopped with "error".

    Tandem's own errors pass through, since they would hit the next episode too; a DataError says which task it is about.
    """
    crash_point("episode.before")
    try:
        episode = await agent(task, llm, key)
    except DataError as problem:
        raise DataError(f"task {task.id!r}: {problem}") from problem
    except TandemError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as problem:
        if isinstance(problem, asyncio.CancelledError) and cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
            raise  # it is the run that ends, and not something of the agent's
        return Episode(key, task, (), task.messages, "error", error=f"{type(problem).__name__}: {problem}")
    returned = getattr(episode, "key", episode)
    if returned != key:
        raise ColumnError(f"the agent returned {returned} when it was asked for {key}; it must return an Episode with that key")
    crash_point("episode.after")
    return episode


async def until_enough(running: Sequence[asyncio.Task[Episode]], enough: int) -> None:
    """Waits until so many episodes have ended well, or all have ended, and cancels the others. An error is whoever awaits it's."""
    pending: set[asyncio.Task[Episode]] = set(running)
    while pending and sum(_ended_well(task) for task in running) < enough:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


def _ended_well(task: asyncio.Task[Episode]) -> bool:
    ended = task.done() and not task.cancelled() and task.exception() is None
    return ended and task.result().stop not in ("abort", "error")


def first_error(problem: BaseException) -> BaseException:
    """The first error inside a task group's, however deep."""
    if isinstance(problem, BaseExceptionGroup):
        return first_error(cast("BaseExceptionGroup[BaseException]", problem).exceptions[0])
    return problem
