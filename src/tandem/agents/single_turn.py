"""One question, one answer."""

from __future__ import annotations

from tandem.ports import LLM
from tandem.types import Episode, Key, Task


class SingleTurn:
    """Implements the AgentLoop port: the task's messages, then one assistant turn, which ends the episode."""

    async def __call__(self, task: Task, llm: LLM, key: Key) -> Episode:
        reply = await llm.chat(task.messages)
        return Episode(key, task, llm.samples(), (*task.messages, reply.message), reply.stop)
