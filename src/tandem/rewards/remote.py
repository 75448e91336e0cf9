"""Rewards from a judge over HTTP: one POST a group, one value an episode in return.

    {"task": {...}, "params": {...}, "episodes": [{...}, ...]}   ->   [1.0, {"value": 0.5, "components": {...}}, {"failed": "why"}]

    call -> try -> a list with a value for each episode                         results
             |  -> another answer                                               failed
             |  -> not reached, no answer in time, 408, 425, 429 or 5xx         pause, and tried again until limit_s is used up
             `  -> another status                                               failed

A failed result names the URL and what was wrong, and is never a 0. A judge need not say the same twice, so all results are
journalled. What is sent is written by `request`; docs/guides/rewards.md shows a judge.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from typing import cast

import httpx2

from tandem.errors import RewardError
from tandem.rewards.config import RewardConfig
from tandem.rewards.patience import within
from tandem.rewards.replay import Journal, recorded, replayed
from tandem.types import Episode, Json, Message, RewardResult, Sample, Task

_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0  # between tries, doubled each time
_AGAIN = frozenset({408, 425, 429})
_PROMISE = "it must be a list with one value for each episode: a number, {value, components} or {failed: reason}"
_LARGEST = 3.4028234663852886e38  # of float32
_NOTHING = Task("probe", ())


class RemoteReward:
    """Implements the Reward port with the judge at `config.url`; see the module's docstring.

    journal: results are recorded there before they are returned, and a group that is all in it is answered from it. Belongs to one
    event loop.
    """

    def __init__(self, config: RewardConfig, journal: Journal | None = None) -> None:
        """Raises RewardError for a URL that nothing can be sent to."""
        assert config.url is not None
        self._config, self._journal = config, journal
        self._name = f"reward url {config.url}"
        self._places = asyncio.Semaphore(config.at_once)
        connections = httpx2.Limits(max_connections=config.at_once, max_keepalive_connections=config.at_once)
        try:
            self._url = httpx2.URL(config.url)
        except httpx2.InvalidURL as problem:
            raise RewardError(f"{self._name} is no address: {problem}") from None
        self._client = httpx2.AsyncClient(timeout=None, limits=connections)

    async def start(self) -> None:
        """Sends a call without episodes, once. Raises RewardError unless the answer is an empty list."""
        try:
            answer = await self._try(request(_NOTHING, (), self._config.params))
        except (_AgainError, _NoAnswerError) as problem:
            raise RewardError(f"{self._name} {problem}; start the judge before the run, or correct reward.url") from None
        if answer != []:
            raise RewardError(f"{self._name} answered a call without episodes with {_shown(answer)}; it must answer []")

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        if (known := replayed(self._journal, group)) is not None:
            return known
        async with self._places:
            results = await self._judge(task, group)
        return recorded(self._journal, group, results)

    async def close(self) -> None:
        await self._client.aclose()

    async def _judge(self, task: Task, group: Sequence[Episode]) -> list[RewardResult]:
        try:
            answer = await self._answer(request(task, group, self._config.params))
            if not isinstance(answer, list):
                raise _NoAnswerError(f"answered {_shown(answer)}; {_PROMISE}")
            values = cast("list[object]", answer)
            if len(values) != len(group):
                raise _NoAnswerError(f"answered {len(values)} values for a group of {len(group)} episodes; {_PROMISE}")
        except _NoAnswerError as problem:
            return [RewardResult.failed(f"{self._name} {problem}")] * len(group)
        return [self._result(value) for value in values]

    def _result(self, value: object) -> RewardResult:
        try:
            return _result(value, self._config.components)
        except _NoAnswerError as problem:
            return RewardResult.failed(f"{self._name} {problem}")

    async def _answer(self, message: bytes) -> object:
        """Of as many tries as there is time for. Raises _NoAnswerError."""
        config, clock, spent_s = self._config, asyncio.get_running_loop().time, 0.0
        for tries in count(1):
            began_s = clock()
            try:
                return await self._try(message)
            except _AgainError as again:
                spent_s += min(clock() - began_s, config.one_try_s)  # the rest is the loop's, which was busy
                pause_s = max(again.after_s, min(_PAUSE_S * 2 ** (tries - 1), _LONGEST_PAUSE_S))
                if spent_s + pause_s >= config.limit_s:
                    asked = f" and asked for {again.after_s:g} s" if again.after_s else ""
                    raise _NoAnswerError(f"{again}{asked}; tries until limit_s={config.limit_s:g}: {tries}") from None
            await asyncio.sleep(pause_s)
            spent_s += pause_s
        raise AssertionError

    async def _try(self, message: bytes) -> object:
        """The JSON of one answer. Raises _AgainError where another try may have one, and _NoAnswerError where not."""
        limit_s = min(self._config.one_try_s, self._config.limit_s)
        headers = {"content-type": "application/json", "accept": "application/json"}
        try:
            response = await within(limit_s, self._client.post(self._url, content=message, headers=headers))
        except TimeoutError:
            raise _AgainError(f"gave no answer within {limit_s:g} s") from None
        except httpx2.RequestError as problem:
            raise _AgainError(f"cannot be reached: {str(problem) or type(problem).__name__}") from None
        if response.is_success:
            try:
                return response.json()
            except (ValueError, RecursionError):
                raise _NoAnswerError(f"answered what is not JSON: {_shown(response.text)}") from None
        said = f"answered {response.status_code} {response.reason_phrase}: {_shown(response.text)}"
        if response.status_code in _AGAIN or response.is_server_error:
            raise _AgainError(said, _seconds(response.headers.get("retry-after", "")))
        raise _NoAnswerError(said)


class _NoAnswerError(Exception):
    """There is no judgement: the message says why, as the end of a sentence about the URL."""


class _AgainError(Exception):
    """There is none this time. after_s: for how long the URL wants to be left alone."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


def request(task: Task, group: Sequence[Episode], params: Mapping[str, Json]) -> bytes:
    """What a judge is sent, as JSON."""
    asked: dict[str, Json] = {
        "id": task.id,
        "messages": _messages(task.messages),
        "answer": task.answer,
        "source": task.source,
        "info": dict(task.info),
    }
    return json.dumps({"task": asked, "params": dict(params), "episodes": [_episode(episode) for episode in group]}).encode()


def _episode(episode: Episode) -> dict[str, Json]:
    return {
        "key": str(episode.key),
        "messages": _messages(episode.messages),
        "completion": episode.completion,
        "stop": episode.stop,
        "env_rewards": list(episode.env_rewards),
        "samples": [_sample(sample) for sample in episode.samples],
    }


def _sample(sample: Sample) -> dict[str, Json]:
    return {"tokens": cast("list[Json]", sample.tokens.tolist()), "mask": cast("list[Json]", sample.mask.tolist())}


def _messages(messages: Sequence[Message]) -> list[Json]:
    return [_message(message) for message in messages]


def _message(message: Message) -> dict[str, Json]:
    """As datasets have it: what a message does not have is left out."""
    written: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        written["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    if message.name is not None:
        written["name"] = message.name
    return written


def _result(value: object, components: Sequence[str]) -> RewardResult:
    """Raises _NoAnswerError for a failure, and for what is no value of an episode."""
    said = _shown(value)
    given = cast("dict[str, object]", value) if isinstance(value, dict) else {"value": value}
    if given.keys() == {"failed"}:
        raise _NoAnswerError(f"could not judge it: {_shown(str(given['failed']))}")
    parts = given.get("components", {})
    if "value" not in given or given.keys() - {"value", "components"} or not isinstance(parts, dict):
        raise _NoAnswerError(f"answered {said} for an episode; {_PROMISE}")
    named = {name: _number(part) for name, part in cast("dict[str, object]", parts).items()}
    if missing := [name for name in components if name not in named]:
        raise _NoAnswerError(f"answered {said} without component {missing[0]!r}, which reward.components names")
    return RewardResult(_number(given["value"]), named)


def _number(value: object) -> float:
    """A finite one, in float32 too, which rewards are. Raises _NoAnswerError for anything else."""
    try:
        if isinstance(value, int | float) and abs(number := float(value)) <= _LARGEST:
            return number
    except OverflowError:
        pass
    raise _NoAnswerError(f"answered {_shown(value)} where a finite number must be; {_PROMISE}")


def _seconds(retry_after: str) -> float:
    """What a Retry-After header asks for: seconds, or the time until a date; 0 where it says neither."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max((date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)


def _shown(answer: object) -> str:
    """For a message: the beginning of it, in one line."""
    text = " ".join((answer if isinstance(answer, str) else json.dumps(answer)).split())
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
