"""A built-in reward: what reasoning-gym's own scorer gives to an answer, from 0 to 1. An extra: `reasoning`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import reasoning_gym  # pyright: ignore[reportMissingTypeStubs]

from tandem.types import Episode, Task

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning(task: Task, group: Sequence[Episode]) -> list[float]:
    """Of the last assistant turn, or of what stands in its last <answer> tags; 0 for one that was cut off."""
    made: Any = task.info.get("reasoning_gym")
    if not isinstance(made, dict):
        raise ValueError(f"task {task.id!r} is none of reasoning_gym/...: its info does not say how its entry is made")
    where = cast("dict[str, Any]", made)
    dataset = _dataset(where["name"], where["size"], where["seed"])
    entry = dataset[where["index"]]

    def score(episode: Episode) -> float:
        tagged = _TAGGED.findall(episode.completion)
        answer = (tagged[-1] if tagged else episode.completion).strip()
        return float(dataset.score_answer(answer, entry)) if episode.stop == "stop" else 0.0

    return [score(episode) for episode in group]


@lru_cache(maxsize=64)
def _dataset(name: str, size: int, seed: int) -> Any:
    return cast("Any", reasoning_gym).create_dataset(name, size=size, seed=seed)
