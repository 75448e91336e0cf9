"""Agents, environments and language models with a script instead of a mind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tandem.ports import LLM, Reply, StepResult
from tandem.types import Episode, Json, Key, Message, PolicyRef, Sample, SamplingParams, Stop, Task

_PROMPT, _END = 1, 0  # tokens of the fake LLM: one for whatever is not sampled, one that ends a turn


class ScriptedLLM:
    """Implements the LLM port with replies that are given; `asked` holds each conversation it was shown.

    replies: texts, or Reply where a turn does not end with "stop". Sampled tokens are characters at logprob -1. Raises
    IndexError when it is asked more often than it has replies, and raises a reply that is an exception.
    """

    def __init__(self, replies: Sequence[str | Reply | Exception], key: Key | None = None) -> None:
        self._replies = list(replies)
        self._key = key or Key("fake", 0)
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        self._stop: Stop = "stop"
        self.asked: list[tuple[Message, ...]] = []

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Json]] = (), params: SamplingParams | None = None
    ) -> Reply:
        self.asked.append(tuple(messages))
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, str):
            reply = Reply(Message("assistant", reply), "stop")
        self._record([ord(character) for character in reply.message.content], reply.stop)
        return reply

    async def complete(self, tokens: Sequence[int], params: SamplingParams | None = None) -> tuple[tuple[int, ...], Stop]:
        reply = await self.chat(())
        return (*(ord(character) for character in reply.message.content), _END), reply.stop

    def samples(self) -> tuple[Sample, ...]:
        mask = np.array(self._mask)
        logprobs = np.where(mask, -1.0, 0.0)
        return (Sample(self._key, np.array(self._tokens), mask, logprobs, ((PolicyRef(), int(mask.sum())),), self._stop),)

    def _record(self, sampled: list[int], stop: Stop) -> None:
        if stop == "stop":
            sampled = [*sampled, _END]
        self._tokens += [_PROMPT, *sampled]
        self._mask += [False, *([True] * len(sampled))]
        self._stop = stop


class FakeEnv:
    """Implements the Env port with results that are given; `actions` and `closed` say what happened to it."""

    def __init__(self, results: Sequence[StepResult | Exception], opening: Sequence[Message] = ()) -> None:
        self._results = list(results)
        self._opening = tuple(opening)
        self.actions: list[Message] = []
        self.closed = 0

    async def start(self) -> tuple[Message, ...]:
        return self._opening

    async def step(self, action: Message) -> StepResult:
        self.actions.append(action)
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        self.closed += 1


class FakeAgent:
    """Implements the AgentLoop port: asks once a task and keeps count of them in `seen`."""

    def __init__(self) -> None:
        self.seen: list[Key] = []

    async def __call__(self, task: Task, llm: LLM, key: Key) -> Episode:
        self.seen.append(key)
        reply = await llm.chat(task.messages)
        return Episode(key, task, llm.samples(), (*task.messages, reply.message), reply.stop)
