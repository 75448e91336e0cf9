"""Groups of finished episodes, for rewards to judge."""

import numpy as np

from tandem.types import Episode, Json, Key, Message, PolicyRef, Sample, Stop, Task


def task(answer: Json = "4") -> Task:
    return Task("t", (Message("user", "2+2="),), answer, "test", {"level": 1})


def episode(text: str, *, answer: Json = "4", stop: Stop = "stop", member: int = 0, env_rewards: tuple[float, ...] = ()) -> Episode:
    key = Key("train", 7, member)
    tokens = np.array([1, 2, ord(text[0]) if text else 3])
    sample = Sample(key, tokens, np.array([False, True, True]), np.array([0, -0.5, -1]), ((PolicyRef(), 2),), stop)
    messages = (*task(answer).messages, Message("assistant", text))
    return Episode(key, task(answer), (sample,), messages, stop, env_rewards)


def group(*texts: str, answer: Json = "4") -> tuple[Episode, ...]:
    return tuple(episode(text, answer=answer, member=member) for member, text in enumerate(texts))
