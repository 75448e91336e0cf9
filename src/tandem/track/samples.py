"""samples.jsonl: what the policy wrote and what it got for it, one line an episode, for people and for later analysis.

Text here is a view for readers; nothing is trained on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.durable import AppendLog
from tandem.track.jsonl import offset_of
from tandem.types import Episode, Json, Key, Message, PolicyRef, Role, Stop


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One episode for readers. prompt: what was asked; text: what followed. In text of several turns, those that the
    policy did not write are marked with their role.

    policy: the oldest that sampled any of its tokens. reward None: not judged, or not possible to judge for `reason`.
    tokens: how many the policy sampled.
    """

    key: Key
    task: str
    prompt: str
    text: str
    reward: float | None
    stop: Stop
    policy: PolicyRef | None
    answer: Json = None
    tokens: int | None = None
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    reason: str = ""

    @classmethod
    def of(cls, episode: Episode) -> SampleRecord:
        task, reward = episode.task, episode.reward
        policies = [sample.oldest_policy for sample in episode.samples]
        return cls(
            key=episode.key,
            task=task.id,
            prompt=_text(task.messages, "user"),
            text=_text(episode.messages[len(task.messages) :], "assistant"),
            reward=reward.value if reward else None,
            stop=episode.stop,
            policy=min((policy for policy in policies if policy is not None), default=None),
            answer=task.answer,
            tokens=sum(int(sample.mask.sum()) for sample in episode.samples),
            components=reward.components if reward else {},
            reason=episode.error or (reward.reason if reward else ""),
        )

    def line(self) -> dict[str, Json]:
        """As it is written; what it does not have is left out."""
        line: dict[str, Json] = {
            "key": str(self.key),
            "task": self.task,
            "prompt": self.prompt,
            "text": self.text,
            "reward": self.reward,
            "stop": self.stop,
            "policy": str(self.policy) if self.policy else None,
        }
        extras: dict[str, Json] = {
            "answer": self.answer,
            "tokens": self.tokens,
            "components": dict(self.components) or None,
            "reason": self.reason or None,
        }
        return line | {name: value for name, value in extras.items() if value is not None}


def _text(messages: Sequence[Message], plain: Role) -> str:
    return "\n".join(message.content if message.role == plain else f"[{message.role}] {message.content}" for message in messages)


class SampleLog:
    """Appends the lines of records to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._log = AppendLog(path)

    def write(self, lines: Iterable[Mapping[str, Json]], step: int) -> None:
        for line in lines:
            self._log.append({"step": step, **line})

    def state(self) -> dict[str, Json]:
        """Where the record stands, and it is durable up to there; see ports.Tracker."""
        return {"offset": self._log.offset()}

    def restore(self, state: Mapping[str, Json]) -> None:
        self._log.truncate(offset_of(state))

    def close(self) -> None:
        self._log.close()
