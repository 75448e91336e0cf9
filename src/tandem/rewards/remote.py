"""Rewards from a judge over HTTP: one POST a group, one value an episode in return.

    {"task": {...}, "params": {...}, "episodes": [{...}, ...]}   ->   [1.0, {"value": 0.5, "components": {...}}, {"failed": "why"}]

    a list with a value for each episode    results
    another answer, or none (see calls.py)  failed

A failed result names the URL and what was wrong, and is never a 0. A judge need not say the same twice, so all results are
journalled. What is sent is written by `request`; docs/guides/rewards.md shows a judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from tandem.errors import RewardError
from tandem.rewards.calls import Caller, NoAnswerError, shown
from tandem.rewards.config import PartConfig, RewardConfig
from tandem.rewards.replay import Journal, recorded, replayed
from tandem.types import Episode, Json, Message, RewardResult, Sample, Task

_PROMISE = "it must be a list with one value for each episode: a number, {value, components} or {failed: reason}"
_LARGEST = 3.4028234663852886e38  # of float32
_NOTHING = Task("probe", ())


class RemoteReward:
    """Implements the Reward port with the judge at `config.url`; see the module's docstring.

    journal: results are recorded there before they are returned, and a group that is all in it is answered from it. Belongs to one
    event loop.
    """

    def __init__(self, config: RewardConfig | PartConfig, journal: Journal | None = None) -> None:
        """Raises RewardError for a URL that nothing can be sent to."""
        assert config.url is not None
        self._config, self._journal = config, journal
        self._name = f"reward url {config.url}"
        self._caller = Caller(self._name, config.url, config)

    async def start(self) -> None:
        """Sends a call without episodes, once. Raises RewardError unless the answer is an empty list."""
        try:
            answer = await self._caller.once(request(_NOTHING, (), self._config.params))
        except NoAnswerError as problem:
            raise RewardError(f"{self._name} {problem}; start the judge before the run, or correct reward.url") from None
        if answer != []:
            raise RewardError(f"{self._name} answered a call without episodes with {shown(answer)}; it must answer []")

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        if (known := replayed(self._journal, group)) is not None:
            return known
        return recorded(self._journal, group, await self._judge(task, group))

    async def close(self) -> None:
        await self._caller.close()

    async def _judge(self, task: Task, group: Sequence[Episode]) -> list[RewardResult]:
        try:
            answer = await self._caller.answer(request(task, group, self._config.params))
            if not isinstance(answer, list):
                raise NoAnswerError(f"answered {shown(answer)}; {_PROMISE}")
            values = cast("list[object]", answer)
            if len(values) != len(group):
                raise NoAnswerError(f"answered {len(values)} values for a group of {len(group)} episodes; {_PROMISE}")
        except NoAnswerError as problem:
            return [RewardResult.failed(f"{self._name} {problem}")] * len(group)
        return [self._result(value) for value in values]

    def _result(self, value: object) -> RewardResult:
        try:
            return _result(value, self._config.promised)
        except NoAnswerError as problem:
            return RewardResult.failed(f"{self._name} {problem}")


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
    """Raises NoAnswerError for a failure, and for what is no value of an episode."""
    said = shown(value)
    given = cast("dict[str, object]", value) if isinstance(value, dict) else {"value": value}
    if given.keys() == {"failed"}:
        raise NoAnswerError(f"could not judge it: {shown(str(given['failed']))}")
    parts = given.get("components", {})
    if "value" not in given or given.keys() - {"value", "components"} or not isinstance(parts, dict):
        raise NoAnswerError(f"answered {said} for an episode; {_PROMISE}")
    named = {name: _number(part) for name, part in cast("dict[str, object]", parts).items()}
    if missing := [name for name in components if name not in named]:
        raise NoAnswerError(f"answered {said} without component {missing[0]!r}, which reward.components names")
    return RewardResult(_number(given["value"]), named)


def _number(value: object) -> float:
    """A finite one, in float32 too, which rewards are. Raises NoAnswerError for anything else."""
    try:
        if isinstance(value, int | float) and abs(number := float(value)) <= _LARGEST:
            return number
    except OverflowError:
        pass
    raise NoAnswerError(f"answered {shown(value)} where a finite number must be; {_PROMISE}")
