"""From the episodes of a group to the rows that are trained on: what each stop, reward and group size leads to.

Pure; the source acts on the verdict. An episode is dropped (it leaves its group), masked (it counts in the group's
statistics and none of its tokens is trained on) or trained on; nothing happens to it without a counted reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tandem.data_proto import DataProto
from tandem.errors import RewardError
from tandem.trainer.fetch import GROUP_ROWS
from tandem.types import Episode, Key, Metric, Metrics, RewardResult, Stop, Task

StopAction = Literal["train", "mask", "drop"]


@dataclass(frozen=True)
class StopPolicy:
    """What becomes of an episode by the way it stopped. "stop" is trained on; "abort" and "error" are always dropped,
    since an unfinished episode must not be judged as if it were whole.

    length: it ran out of tokens. tool_limit: it ran out of turns or tool calls.
    """

    length: StopAction = "train"
    tool_limit: StopAction = "train"

    def action(self, stop: Stop) -> StopAction:
        match stop:
            case "stop":
                return "train"
            case "length":
                return self.length
            case "tool_limit":
                return self.tool_limit
            case "abort" | "error":
                return "drop"


@dataclass(frozen=True)
class Verdict:
    """kept: the episodes that stay, none where the whole group is dropped for `reason`. dropped: places, and why."""

    kept: tuple[Episode, ...]
    dropped: Mapping[Key, str]
    reason: str = ""


def to_judge(episodes: Sequence[Episode], policy: StopPolicy) -> tuple[list[Episode], dict[Key, str]]:
    """The episodes that a reward may see, and the others with the reason why not: their stop, or "no_sample".

    A sample that was aborted or failed is unfinished whatever its agent says of the episode: its stop is the reason then.
    """
    judged: list[Episode] = []
    dropped: dict[Key, str] = {}
    for episode in episodes:
        unfinished = [sample for sample in episode.samples if sample.stop in ("abort", "error")]
        stop = unfinished[0].stop if unfinished else episode.stop
        if policy.action(stop) == "drop":
            dropped[episode.key] = stop
        elif not episode.samples:
            dropped[episode.key] = "no_sample"
        else:
            judged.append(episode)
    return judged, dropped


def with_rewards(
    task: Task, episodes: Sequence[Episode], results: Sequence[RewardResult], components: Sequence[str] = ()
) -> list[Episode]:
    """The episodes with their rewards.

    components: parts that each reward must have, unless it failed. Raises RewardError for a wrong count, a part that is
    missing, or rewards that no estimator credits.
    """
    if len(results) != len(episodes):
        raise RewardError(f"the reward of task {task.id!r} gave {len(results)} results for {len(episodes)} episodes")
    if any(result.token_rewards for result in results):
        raise RewardError(f"the reward of task {task.id!r} gives token rewards, which no estimator credits; add them to its value")
    for result in results:
        if result.ok and (missing := [name for name in components if name not in result.components]):
            raise RewardError(
                f"the reward of task {task.id!r} lacks component {missing[0]!r}, which reward.components names; it has "
                f"{', '.join(result.components) or 'none'}: return RewardResult(value, {{{missing[0]!r}: ...}}) for each episode"
            )
    return [replace(episode, reward=result) for episode, result in zip(episodes, results, strict=True)]


def verdict(
    judged: Sequence[Episode],
    dropped: Mapping[Key, str],
    *,
    min_episodes: int,
    keep: Callable[[Tensor], bool] | None,
    lacks: str = "",
) -> Verdict:
    """What is left of a group.

    An episode that nobody judged is kept. Reasons: "reward_failed" for an episode; for the whole group "group_too_small" where
    fewer than `min_episodes` are left, `lacks` where the group misses something else that it cannot be trained on without, and
    "filtered" where `keep` refuses its rewards.
    """
    reasons = dict(dropped)
    kept: list[Episode] = []
    rewards: list[float] = []
    for episode in judged:
        if episode.reward is not None and episode.reward.value is None:
            reasons[episode.key] = "reward_failed"
            continue
        kept.append(episode)
        if episode.reward is not None and episode.reward.value is not None:
            rewards.append(episode.reward.value)
    reason = lacks
    if len(kept) < max(min_episodes, 1):
        reason = "group_too_small"
    elif not reason and keep is not None and not keep(torch.tensor(rewards, dtype=torch.float32)):
        reason = "filtered"
    if reason:
        return Verdict((), reasons | {episode.key: reason for episode in kept}, reason)
    return Verdict(tuple(kept), reasons)


def episode_rows(episodes: Sequence[Episode], policy: StopPolicy) -> DataProto:
    """One row a sample of a group's episodes; masked ones have no true mask.

    Row columns `rewards` (its episode's, where it was judged) and `group_rows` (int64, the number of these rows); object column
    `stop` (its episode's).
    """
    owners = _owners(episodes)
    rows = DataProto.from_samples([sample for episode in episodes for sample in episode.samples])
    counts = torch.tensor([policy.action(episode.stop) == "train" for episode in owners])
    values = [episode.reward.value for episode in owners if episode.reward is not None]
    rewards = {"rewards": torch.tensor(values, dtype=torch.float32)} if values else {}
    return rows.with_columns(
        token={"mask": rows["mask"] & counts[rows.row_of_token]},
        row={GROUP_ROWS: torch.full((len(owners),), len(owners))} | rewards,
        objects={"stop": [episode.stop for episode in owners]},
    )


def reward_components(episodes: Sequence[Episode], names: Sequence[str]) -> Tensor:
    """float32 [B, K] for the rows of `episode_rows`: the named parts of each reward, in this order."""
    results = [episode.reward for episode in _owners(episodes) if episode.reward is not None]
    return torch.tensor([[result.components[name] for name in names] for result in results], dtype=torch.float32)


def _owners(episodes: Sequence[Episode]) -> list[Episode]:
    """The episode of each row."""
    return [episode for episode in episodes for _ in episode.samples]


def group_metrics(episodes: Sequence[Episode], judged: Sequence[Episode], outcome: Verdict) -> Metrics:
    """Of one group: `reward/` over its judged episodes, `rollout/` over all of them, drops by reason."""
    values = [episode.reward.value for episode in judged if episode.reward is not None and episode.reward.value is not None]
    sampled = [sum(int(sample.mask.sum()) for sample in episode.samples) for episode in episodes]
    stops = Counter(episode.stop for episode in episodes)
    cut = [not sample.full_support for episode in episodes for sample in episode.samples]
    parts = [
        (name, value)
        for episode in judged
        if episode.reward is not None and episode.reward.ok
        for name, value in episode.reward.components.items()
    ]
    metrics = Metrics(
        {
            "reward/mean": Metric(sum(values), len(values)),
            "rollout/episodes": Metric(len(episodes), reduction="sum"),
            "rollout/sampled_tokens": Metric(sum(sampled), reduction="sum"),
            "rollout/length": Metric(sum(sampled), len(episodes)),
            "rollout/cut_support": Metric(sum(cut), len(cut)),
            "rollout/dropped_groups": Metric(float(not outcome.kept), reduction="sum"),
            **{f"rollout/stop_{stop}": Metric(stops[stop], len(episodes)) for stop in ("stop", "length", "tool_limit")},
        }
    )
    for reason, count in Counter(outcome.dropped.values()).items():
        metrics += Metrics.sum({f"rollout/dropped_{reason}": count})
    for name, value in parts:
        metrics += Metrics.mean({f"reward/{name}": value})
    return metrics
