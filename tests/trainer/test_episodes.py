"""The supervised edge around an agent; what it does to a run is in test_source.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.errors import ColumnError
from tandem.rollout.fake import FakeLLM
from tandem.trainer.episodes import first_error, run_episode
from tandem.types import Episode, Key, Task

KEY = Key("t", 0)


def episode_of(outcome: Any) -> Episode:
    """Of an agent that returns `outcome`, or raises it."""

    async def agent(*_: Any) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return asyncio.run(run_episode(agent, Task("a", ()), FakeLLM((), KEY), KEY))


@pytest.mark.parametrize("problem", [ValueError("broken"), SystemExit(3), asyncio.CancelledError("a tool's")])
def test_what_an_agent_raises_ends_its_episode_only(problem: BaseException) -> None:
    """A cancelled task of the agent's own is one of its failures: the episode would be missing without a word."""
    episode = episode_of(problem)
    assert episode.stop == "error"
    assert episode.error == f"{type(problem).__name__}: {problem}"


def test_a_cancelled_episode_is_cancelled() -> None:
    async def scene() -> None:
        async def agent(*_: Any) -> Any:
            await asyncio.sleep(60)

        running = asyncio.create_task(run_episode(agent, Task("a", ()), FakeLLM((), KEY), KEY))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scene())


@pytest.mark.parametrize("wrong", [None, "text", Episode(Key("t", 1), Task("a", ()), (), (), "stop")])
def test_what_is_not_the_episode_that_was_asked_for(wrong: object) -> None:
    with pytest.raises(ColumnError, match=r"when it was asked for t:0\.0\.0; it must return an Episode with that key"):
        episode_of(wrong)


def test_the_first_error_is_found_however_deep() -> None:
    inner = ExceptionGroup("inner", [ValueError("first"), KeyError("second")])
    assert str(first_error(ExceptionGroup("outer", [inner, TypeError("third")]))) == "first"
    plain = ValueError("alone")
    assert first_error(plain) is plain
