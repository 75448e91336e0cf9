"""Reward shaping: what is taken off a judged reward for how long an answer is and how it stopped.

    judged -> the filter of dynamic sampling -> shaped -> column `rewards`, group statistics

The filter sees what was judged: whether a task still teaches something is a question of its outcome, and answers that are
all right and of different lengths would pass a filter of shaped rewards. What is credited is the shaped reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from tandem.algos.shaping import overlong_penalty, stop_properly
from tandem.types import Episode, Metrics


@dataclass(frozen=True)
class ShapingConfig:
    """Both are off by default; with both, the penalty comes off what an answer that was cut off earns.

    overlong_buffer_tokens: the last tokens of sampling.max_tokens, over which a penalty grows from 0 to overlong_penalty
    (DAPO); 0 is off. stop_coef: an answer that ran out of tokens earns this share of its reward, or exactly this where it
    is negative (ProRL); null is off.
    """

    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0
    stop_coef: float | None = None

    def __post_init__(self) -> None:
        if self.overlong_buffer_tokens < 0:
            raise ValueError(f"overlong_buffer_tokens must not be negative, got {self.overlong_buffer_tokens}")
        if not self.overlong_penalty > 0:
            raise ValueError(f"overlong_penalty must be positive, got {self.overlong_penalty}; to take nothing off, leave it out")
        if self.stop_coef is not None and not self.stop_coef < 1:
            raise ValueError(f"stop_coef must be below 1, got {self.stop_coef}: an answer that was cut off would earn more")

    @property
    def on(self) -> bool:
        return bool(self.overlong_buffer_tokens) or self.stop_coef is not None


def shaped(episodes: Sequence[Episode], config: ShapingConfig, *, max_tokens: int) -> list[Episode]:
    """The episodes, all of them with a reward that did not fail, with shaped values in place of judged ones.

    The length of an answer is that of the episode's longest sample, in sampled tokens, of which max_tokens may be sampled.
    """
    if not config.on or not episodes:
        return list(episodes)
    results = [episode.reward for episode in episodes if episode.reward is not None]
    rewards = torch.tensor([result.value for result in results if result.value is not None], dtype=torch.float64)
    if config.stop_coef is not None:
        truncated = torch.tensor([episode.stop == "length" for episode in episodes])
        rewards = stop_properly(rewards, truncated, coef=config.stop_coef)
    if config.overlong_buffer_tokens:
        rewards = overlong_penalty(
            rewards,
            torch.tensor([max(int(sample.mask.sum()) for sample in episode.samples) for episode in episodes]),
            max_len=max_tokens,
            buffer_len=config.overlong_buffer_tokens,
            penalty_factor=config.overlong_penalty,
        )
    values = cast("list[float]", rewards.tolist())
    return [
        replace(episode, reward=replace(result, value=value))
        for episode, result, value in zip(episodes, results, values, strict=True)
    ]


def shaping_metrics(judged: Sequence[Episode], credited: Sequence[Episode]) -> Metrics:
    """The mean reward that is credited, beside `reward/mean`, and the share of episodes whose reward was changed."""
    pairs = [
        (after.reward.value, after.reward.value != before.reward.value)
        for before, after in zip(judged, credited, strict=True)
        if before.reward is not None and after.reward is not None and after.reward.value is not None
    ]
    means = {"reward/shaped": sum(value for value, _ in pairs), "reward/shaped_frac": sum(changed for _, changed in pairs)}
    return Metrics.mean({name: total / len(pairs) for name, total in means.items()}, len(pairs))
