"""An assistant and an environment that talk in turns."""

from __future__ import annotations

from collections.abc import Callable

from tandem.ports import LLM, Env
from tandem.types import Episode, Key, Message, Stop, Task


class EnvLoop:
    """Implements the AgentLoop port: the assistant acts, the environment answers, until one of them ends it.

    make_env: builds one episode's environment; it is closed however the episode ends. The conversation begins with the
    task's messages and those of `Env.start`. The episode's stop is "stop" where the environment says that it is done,
    "tool_limit" where it truncates or `max_turns` assistant turns are over, and the turn's own ("length", "abort",
    "error") where a turn does not come to its end: the environment does not see such a turn.
    """

    def __init__(self, make_env: Callable[[Task], Env], max_turns: int) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns} and must be at least 1")
        self._make_env = make_env
        self._max_turns = max_turns

    async def __call__(self, task: Task, llm: LLM, key: Key) -> Episode:
        env = self._make_env(task)
        messages: list[Message] = list(task.messages)
        rewards: list[float] = []
        stop: Stop = "tool_limit"
        try:
            messages += await env.start()
            for _ in range(self._max_turns):
                reply = await llm.chat(messages)
                messages.append(reply.message)
                if reply.stop != "stop":
                    stop = reply.stop
                    break
                result = await env.step(reply.message)
                rewards.append(result.reward)
                messages += result.messages
                if result.done or result.truncated:
                    stop = "stop" if result.done else "tool_limit"
                    break
        finally:
            await env.close()
        return Episode(key, task, llm.samples(), tuple(messages), stop, tuple(rewards))
