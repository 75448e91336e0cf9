"""A judge over HTTP that is down, slow, busy or talks nonsense: what becomes of a group, and what is said before a run."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

import pytest

from tandem.errors import RewardError
from tandem.rewards.config import RewardConfig
from tandem.rewards.remote import RemoteReward, request
from tandem.types import Message, RewardResult, ToolCall
from tests.rewards.episodes import episode, group, task
from tests.rewards.judge import Judge, judging

T = TypeVar("T")


@pytest.fixture
def judge() -> Generator[Judge]:
    with judging() as server:
        yield server


def run(config: RewardConfig, use: Callable[[RemoteReward], Awaitable[T]], journal: dict[str, RewardResult] | None = None) -> T:
    """Uses a reward, closes it, and looks that no task of it is left."""

    async def main() -> T:
        reward = RemoteReward(config, None if journal is None else DictJournal(journal))
        try:
            return await use(reward)
        finally:
            await reward.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(main())


class DictJournal:
    def __init__(self, entries: dict[str, RewardResult]) -> None:
        self.get, self._entries = entries.get, entries

    def record(self, results: Mapping[str, RewardResult]) -> None:
        self._entries.update(results)


def results(config: RewardConfig, *texts: str, journal: dict[str, RewardResult] | None = None) -> list[RewardResult]:
    async def use(reward: RemoteReward) -> list[RewardResult]:
        return list(await reward(task(), group(*texts)))

    return run(config, use, journal)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_judge_is_sent_all_that_it_needs(judge: Judge) -> None:
    config = RewardConfig(url=judge.url, params={"rubric": "strict"})
    assert [result.value for result in results(config, "4", "5", "4")] == [1, 0, 1]
    (sent,) = judge.requests
    question = {"role": "user", "content": "2+2="}
    assert sent["params"] == {"rubric": "strict"}
    assert sent["task"] == {"id": "t", "messages": [question], "answer": "4", "source": "test", "info": {"level": 1}}
    assert sent["episodes"][1] == {
        "key": "train:7.1.0",
        "messages": [question, {"role": "assistant", "content": "5"}],
        "completion": "5",
        "stop": "stop",
        "env_rewards": [],
        "samples": [{"tokens": [1, 2, ord("5")], "mask": [False, True, True]}],
    }


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("0.5", RewardResult(0.5)),
        ("true", RewardResult(1.0)),
        ('{"value": 2}', RewardResult(2.0)),
        ('{"value": 0.5, "components": {"style": 1}}', RewardResult(0.5, {"style": 1.0})),
    ],
)
def test_a_value_is_a_number_alone_or_with_its_parts(judge: Judge, said: str, expected: RewardResult) -> None:
    assert results(RewardConfig(url=judge.url), f"one:{said}", "b") == [expected, RewardResult(1.0)]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('{"failed": "no tests"}', "could not judge it: 'no tests'"),
        ("NaN", "answered 'NaN' where a finite number must be"),
        ("1e999", "answered 'Infinity' where a finite number must be"),
        ("1e300", "answered '1e+300' where a finite number must be"),
        ("1" + "0" * 400, "where a finite number must be"),
        ("null", "answered 'null' where a finite number must be"),
        ('"good"', "answered 'good' where a finite number must be"),
        ("[1]", "answered '[1]' where a finite number must be"),
        ('{"values": 1}', "answered '{\"values\": 1}' for an episode"),
        ('{"value": 1, "component": {}}', "for an episode; it must be a list with one value for each episode"),
        ('{"value": 1, "components": 2}', "for an episode"),
        ('{"value": 1, "components": {"style": NaN}}', "answered 'NaN' where a finite number must be"),
        ('{"failed": "\\ud800"}', "could not judge it"),
    ],
)
def test_nonsense_about_one_episode_fails_that_one_and_names_the_url(judge: Judge, said: str, reason: str) -> None:
    bad, good = results(RewardConfig(url=judge.url), f"one:{said}", "b")
    assert good == RewardResult(1.0)
    assert not bad.ok
    assert bad.reason.startswith(f"reward url {judge.url} ")
    assert reason in bad.reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("raw:<html>\n504", "answered what is not JSON: '<html> 504'"),
        ("raw:", "answered what is not JSON: ''"),
        ("raw:" + "[" * 100_000, "answered what is not JSON: '[["),
        ("raw:1.0", "answered '1.0'; it must be a list"),
        ('raw:{"rewards": [1, 1]}', "answered '{\"rewards\": [1, 1]}'; it must be a list"),
        ("raw:[1]", "answered 1 values for a group of 2 episodes"),
        ("raw:[1, 1, 1]", "answered 3 values for a group of 2 episodes"),
        ("status:404", "answered 404 Not Found: 'out of order'"),
        ("status:301", "answered 301 Moved Permanently"),
    ],
)
def test_nonsense_about_a_group_fails_all_of_it_at_once(judge: Judge, said: str, reason: str) -> None:
    found = results(RewardConfig(url=judge.url), said, "b")
    assert [result.ok for result in found] == [False, False]
    assert all(result.reason.startswith(f"reward url {judge.url} ") and reason in result.reason for result in found)
    assert len(judge.requests) == 1


def test_a_part_that_the_recipe_names_has_to_be_there(judge: Judge) -> None:
    said = 'one:{"value": 1, "components": {"style": 1}}'
    (bad,) = results(RewardConfig(url=judge.url, components=("style", "right")), said)
    assert "without component 'right', which reward.components names" in bad.reason
    (good,) = results(RewardConfig(url=judge.url, components=("style",)), said)
    assert good.components == {"style": 1.0}


@pytest.mark.parametrize("trouble", ["busy:0", "busy:soon", "cut:", "hang:"])
def test_a_judge_that_is_busy_or_lost_is_asked_again(judge: Judge, trouble: str) -> None:
    (result,) = results(RewardConfig(url=judge.url, limit_s=20, try_limit_s=1), trouble)
    assert result == RewardResult(2.0)


@pytest.mark.parametrize(("trouble", "least_s", "most_s"), [("busy:0", 0.25, 0.25), ("busy:7", 7, 7), ("date:", 3000, 3600)])
def test_it_is_left_alone_for_as_long_as_it_asks(
    judge: Judge, trouble: str, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("tandem.rewards.calls.asyncio.sleep", sleep)
    assert results(RewardConfig(url=judge.url, limit_s=4000), trouble) == [RewardResult(2.0)]
    (pause_s,) = pauses
    assert least_s <= pause_s <= most_s


def test_pauses_grow_until_the_limit(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("tandem.rewards.calls.asyncio.sleep", sleep)
    (result,) = results(RewardConfig(url=judge.url, limit_s=30, try_limit_s=0.1), "status:500")
    assert not result.ok
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 8]  # the next would be beyond 30


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("status:500", "answered 500 Internal Server Error: 'out of order'; tries until limit_s=0.6: "),
        ("busy:120", "answered 503 Service Unavailable: 'busy' and asked for 120 s; tries until limit_s=0.6: "),
        ("slow:1.0", "gave no answer within 0.2 s; tries until limit_s=0.6: "),
    ],
)
def test_what_lasts_longer_than_the_limit_is_a_failure(judge: Judge, said: str, reason: str) -> None:
    found = results(RewardConfig(url=judge.url, limit_s=0.6), said, "b")
    assert [result.ok for result in found] == [False, False]
    assert all(result.reason.startswith(f"reward url {judge.url} {reason}") for result in found)


def test_a_url_that_is_down_is_a_failure_that_says_so() -> None:
    url = f"http://127.0.0.1:{free_port()}/score"
    (result,) = results(RewardConfig(url=url, limit_s=0.3), "4")
    assert result.reason.startswith(f"reward url {url} cannot be reached: ")
    assert "; tries until limit_s=0.3: " in result.reason


def test_no_more_calls_at_once_than_the_recipe_says(judge: Judge) -> None:
    async def use(reward: RemoteReward) -> list[Any]:
        return await asyncio.gather(*(reward(task(), group("slow:0.05", "b")) for _ in range(12)))

    found = run(RewardConfig(url=judge.url, workers=3), use)
    assert all(result.ok for members in found for result in members)
    assert (len(judge.requests), judge.most) == (12, 3)


def test_waiting_for_a_place_uses_up_no_limit(judge: Judge) -> None:
    """Ten calls, one after the other, take longer than one may."""

    async def use(reward: RemoteReward) -> list[Any]:
        return await asyncio.gather(*(reward(task(), group("slow:0.2")) for _ in range(10)))

    found = run(RewardConfig(url=judge.url, workers=1, limit_s=1.5, try_limit_s=1.5), use)
    assert all(result.ok for members in found for result in members)
    assert len(judge.requests) == 10


def test_a_busy_event_loop_does_not_use_up_the_limit(judge: Judge) -> None:
    async def use(reward: RemoteReward) -> list[RewardResult]:
        judging = asyncio.ensure_future(reward(task(), group("slow:0.1")))
        await asyncio.sleep(0.01)
        time.sleep(1)  # noqa: ASYNC251 as a training step does
        return list(await judging)

    (result,) = run(RewardConfig(url=judge.url, limit_s=0.5, try_limit_s=0.5), use)
    assert result.ok
    assert len(judge.requests) == 1


def test_a_cancelled_call_leaves_nothing_behind(judge: Judge) -> None:
    async def use(reward: RemoteReward) -> list[RewardResult]:
        waiting = asyncio.ensure_future(reward(task(), group("slow:0.5")))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return list(await reward(task(), group("4")))

    assert run(RewardConfig(url=judge.url, workers=1), use) == [RewardResult(1.0)]


def test_what_a_judge_said_is_recorded_and_replayed(judge: Judge) -> None:
    journal: dict[str, RewardResult] = {}
    config = RewardConfig(url=judge.url)
    first = results(config, "one:2", "b", journal=journal)
    assert journal == {"train:7.0.0": RewardResult(2.0), "train:7.1.0": RewardResult(1.0)}
    assert results(config, "one:3", "b", journal=journal) == first  # the key counts
    assert len(judge.requests) == 1
    failed = results(config, "status:400", journal={})
    journal = {"train:7.0.0": failed[0]}
    assert results(config, "4", journal=journal) == failed


def test_a_group_that_is_partly_recorded_is_judged_again(judge: Judge) -> None:
    journal = {"train:7.0.0": RewardResult(9.0)}
    assert [result.value for result in results(RewardConfig(url=judge.url), "4", "4", journal=journal)] == [1, 1]
    assert journal["train:7.0.0"] == RewardResult(1.0)


def test_a_run_begins_with_a_call_without_episodes(judge: Judge) -> None:
    run(RewardConfig(url=judge.url, params={"rubric": "strict"}), lambda reward: reward.start())
    empty = {"id": "probe", "messages": [], "answer": None, "source": "", "info": {}}
    assert judge.requests == [{"task": empty, "params": {"rubric": "strict"}, "episodes": []}]


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("raw:[1]", r"answered a call without episodes with '\[1\]'; it must answer \[\]"),
        ("raw:{}", r"answered a call without episodes with '\{\}'; it must answer \[\]"),
        ("raw:hello", "answered what is not JSON: 'hello'; start the judge before the run, or correct reward.url"),
        ("status:404", "answered 404 Not Found"),
        ("status:503", "answered 503 Service Unavailable"),
        ("slow:1.0", "gave no answer within 0.3 s"),
    ],
)
def test_a_run_does_not_begin_with_a_judge_that_talks_nonsense(judge: Judge, path: str, match: str) -> None:
    url = f"{judge.url}?{quote(path)}"
    with pytest.raises(RewardError, match=match):
        run(RewardConfig(url=url, limit_s=0.9), lambda reward: reward.start())
    assert len(judge.requests) == 1


def test_a_run_does_not_begin_with_a_judge_that_is_down() -> None:
    url = f"http://127.0.0.1:{free_port()}/score"
    with pytest.raises(RewardError, match=f"reward url {url} cannot be reached: .*; start the judge before the run"):
        run(RewardConfig(url=url), lambda reward: reward.start())


def test_a_conversation_with_tools_is_sent_as_datasets_have_it() -> None:
    whole = episode("", member=1)
    calling = Message("assistant", "", (ToolCall("add", "{}"),))
    whole = replace(whole, messages=(*whole.messages, calling, Message("tool", "4", name="add")))
    (sent,) = json.loads(request(task(), [whole], {}))["episodes"]
    assert sent["messages"][-2:] == [
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "{}"}]},
        {"role": "tool", "content": "4", "name": "add"},
    ]
