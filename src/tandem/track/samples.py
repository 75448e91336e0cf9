"""samples.jsonl: what the policy wrote, what it got for it and what became of it, one line an episode, for people.

Text here is a view for readers; nothing is trained on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from tandem.durable import AppendLog, records
from tandem.errors import SnapshotError
from tandem.track.jsonl import offset_of
from tandem.types import Episode, Json, Key, Message, PolicyRef, Role, Stop


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One episode for readers. prompt: what was asked; text: what followed. In text of several turns, those that the
    policy did not write are marked with their role; completion is the policy's last turn then, and else None.

    policy: the oldest that sampled any of its tokens. reward None: not judged, or not possible to judge for `reason`.
    tokens: how many the policy sampled. dropped: why it was not trained on; "" where it was.
    """

    key: Key
    task: str
    prompt: str
    text: str
    reward: float | None
    stop: Stop
    policy: PolicyRef | None
    completion: str | None = None
    answer: Json = None
    tokens: int | None = None
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    reason: str = ""
    advantage: float | None = None
    ratio: float | None = None
    dropped: str = ""

    @classmethod
    def of(cls, episode: Episode) -> SampleRecord:
        task, reward = episode.task, episode.reward
        policies = [sample.oldest_policy for sample in episode.samples]
        text = _text(episode.messages[len(task.messages) :], "assistant")
        return cls(
            key=episode.key,
            task=task.id,
            prompt=_text(task.messages, "user"),
            text=text,
            reward=reward.value if reward else None,
            stop=episode.stop,
            policy=min((policy for policy in policies if policy is not None), default=None),
            completion=None if episode.completion == text else episode.completion,
            answer=task.answer,
            tokens=sum(int(sample.mask.sum()) for sample in episode.samples),
            components=reward.components if reward else {},
            reason=episode.error or (reward.reason if reward else ""),
        )

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> SampleRecord:
        """Inverse of `line`. Raises SnapshotError for anything else."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in line.items() if name in known}
        try:
            values["policy"] = PolicyRef.parse(values["policy"]) if values["policy"] else None
            values["key"] = Key.parse(values["key"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as problem:
            raise SnapshotError(f"{dict(line)} is not the record of an episode: {problem!r}") from problem

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
            "completion": self.completion,
            "answer": self.answer,
            "tokens": self.tokens,
            "components": dict(self.components) or None,
            "reason": self.reason or None,
            "advantage": self.advantage,
            "ratio": self.ratio,
            "dropped": self.dropped or None,
        }
        return line | {name: value for name, value in extras.items() if value is not None}


def _text(messages: Sequence[Message], plain: Role) -> str:
    return "\n".join(message.content if message.role == plain else f"[{message.role}] {message.content}" for message in messages)


def read_samples(path: Path) -> Iterator[tuple[int, SampleRecord]]:
    """The step of each record, in which it was trained on or after which it was dropped, and the record."""
    for line in records(path):
        yield int(cast("int", line.get("step", 0))), SampleRecord.read(line)


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
