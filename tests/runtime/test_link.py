"""link: two ends in one process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tandem.errors import WorkerError
from tandem.runtime.link import Link, Question, pair


@contextmanager
def ends(receive: Any) -> Generator[tuple[Link, Link, threading.Event]]:
    lost = threading.Event()
    one, other = pair()
    asking, answering = Link(one, lambda value, question: None), Link(other, receive, lost.set)
    try:
        yield asking, answering, lost
    finally:
        asking.close()
        assert lost.wait(5)


def test_questions_are_answered_each_in_its_own_time() -> None:
    kept: list[Question] = []

    def receive(value: int, question: Question) -> None:
        if value < 0:
            kept.append(question)
        elif value == 0:
            question.fail(KeyError("nothing"))
        else:
            question.reply(value + 1)

    async def scenario(link: Link) -> None:
        late = asyncio.ensure_future(link.call(-1))
        assert await asyncio.gather(*(link.call(i) for i in range(1, 50))) == list(range(2, 51))
        with pytest.raises(KeyError, match="nothing"):
            await link.call(0)
        assert link.call_blocking(7) == 8
        kept[0].reply("late")
        assert await late == "late"

    with ends(receive) as (link, _, _):
        asyncio.run(scenario(link))


def test_an_end_that_does_not_read_blocks_nobody_and_loses_nothing() -> None:
    seen: list[int] = []
    reading = threading.Event()

    def receive(value: tuple[int, str], question: Question) -> None:
        reading.wait(10)
        seen.append(value[0])
        question.reply(None)

    async def scenario(link: Link) -> None:
        began = time.monotonic()
        asked = [asyncio.ensure_future(link.call((i, "x" * 20_000))) for i in range(100)]
        await asyncio.sleep(0.1)
        assert time.monotonic() - began < 2
        assert not any(answer.done() for answer in asked)
        reading.set()
        await asyncio.gather(*asked)
        assert seen == list(range(100))

    with ends(receive) as (link, _, _):
        asyncio.run(scenario(link))


def test_what_is_asked_fails_when_the_other_end_goes() -> None:
    async def scenario(link: Link, other: Link) -> None:
        asked = asyncio.ensure_future(link.call(torch.zeros(1 << 16)))
        await asyncio.sleep(0.05)
        other.close()
        with pytest.raises(ConnectionError):
            await asked
        with pytest.raises(ConnectionError):
            await link.call(1)

    descriptors = len(os.listdir("/proc/self/fd"))
    with ends(lambda value, question: None) as (link, other, _):
        asyncio.run(scenario(link, other))
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # the reader's own, and a segment that is kept


def test_an_answer_that_nobody_waits_for_is_let_go() -> None:
    kept: list[Question] = []

    async def scenario(link: Link) -> None:
        asked = asyncio.ensure_future(link.call("slow"))
        await asyncio.sleep(0.05)
        asked.cancel()
        kept[0].reply(torch.ones(1 << 16))
        assert torch.equal(await link.call("quick"), torch.zeros(1 << 16))

    def receive(value: str, question: Question) -> None:
        if value == "slow":
            kept.append(question)
        else:
            question.reply(torch.zeros(1 << 16))

    with ends(receive) as (link, _, _):
        asyncio.run(scenario(link))


def test_a_question_that_nobody_can_answer_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(value: object, question: Question) -> None:
        raise RuntimeError("Event loop is closed")

    async def scenario(link: Link) -> None:
        with pytest.raises(RuntimeError, match="loop is closed"):
            await link.call(1)
        monkeypatch.setattr("tandem.runtime.parcels.Inbox.add", lambda self, ident, capacity, fd: os.close(fd))
        with pytest.raises(WorkerError, match="ulimit -n"):
            await link.call(torch.zeros(1 << 16))

    with ends(receive) as (link, _, _):
        asyncio.run(scenario(link))


def test_an_answer_that_comes_twice_is_one_answer() -> None:
    def receive(value: int, question: Question) -> None:
        question.reply(value)
        question.reply(value + 1)

    async def scenario() -> None:
        with ends(receive) as (link, _, _):
            assert [await link.call(number) for number in range(5)] == list(range(5))

    asyncio.run(scenario())
