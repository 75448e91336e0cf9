"""samples.jsonl: what the policy wrote and what it got for it, one line an episode, for people and for later analysis.

Text here is a view for readers; nothing is trained on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.durable import AppendLog
from tandem.track.jsonl import offset_of
from tandem.types import Episode, Json, Message


def prompt_text(episode: Episode) -> str:
    """What the policy was asked."""
    return _text(episode.task.messages)


def reply_text(episode: Episode) -> str:
    """What followed; in several turns, those that the policy did not write are marked with their role."""
    return _text(episode.messages[len(episode.task.messages) :])


def _text(messages: Sequence[Message]) -> str:
    plain = "assistant" if any(message.role == "assistant" for message in messages) else "user"
    return "\n".join(message.content if message.role == plain else f"[{message.role}] {message.content}" for message in messages)


class SampleLog:
    """Appends episodes to a file of JSON lines. `policy` in a line is the oldest one that sampled any of its tokens."""

    def __init__(self, path: Path) -> None:
        self._log = AppendLog(path)

    def write(self, episodes: Sequence[Episode], step: int) -> None:
        for episode in episodes:
            policies = [sample.oldest_policy for sample in episode.samples]
            oldest = min((policy for policy in policies if policy is not None), default=None)
            reward = episode.reward
            record: dict[str, Json] = {
                "step": step,
                "key": str(episode.key),
                "task": episode.task.id,
                "prompt": prompt_text(episode),
                "text": reply_text(episode),
                "answer": episode.task.answer,
                "reward": None if reward is None else reward.value,
                "stop": episode.stop,
                "policy": None if oldest is None else str(oldest),
                "tokens": sum(int(sample.mask.sum()) for sample in episode.samples),
            }
            if reward is not None and reward.components:
                record["components"] = dict(reward.components)
            if reason := episode.error or (reward.reason if reward else ""):
                record["reason"] = reason
            self._log.append(record)

    def state(self) -> dict[str, Json]:
        """Where the record stands, and it is durable up to there; see ports.Tracker."""
        return {"offset": self._log.offset()}

    def restore(self, state: Mapping[str, Json]) -> None:
        self._log.truncate(offset_of(state))

    def close(self) -> None:
        self._log.close()
