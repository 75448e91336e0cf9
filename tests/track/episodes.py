"""Small episodes for the tests of this room."""

from __future__ import annotations

import numpy as np

from tandem.types import Episode, Key, Message, PolicyRef, RewardResult, Sample, Task


def episode(ordinal: int, text: str, reward: RewardResult | None) -> Episode:
    """One turn on one task: a prompt token and two that policy@0.2 sampled."""
    key = Key("train", ordinal)
    task = Task(f"task-{ordinal}", (Message("user", "17 * 23 + 4 ="),), answer="395")
    sample = Sample(
        key,
        tokens=np.array([1, 2, 3]),
        mask=np.array([False, True, True]),
        logprobs=np.array([0, -0.5, -0.25], np.float32),
        policy=((PolicyRef(version=2), 2),),
        stop="stop",
    )
    return Episode(key, task, (sample,), (*task.messages, Message("assistant", text)), "stop", reward=reward)
