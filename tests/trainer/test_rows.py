"""Rows: what stops, rewards and group sizes lead to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tandem.errors import RewardError
from tandem.trainer.rows import StopPolicy, episode_rows, group_metrics, to_judge, verdict, with_rewards
from tandem.types import Episode, Key, PolicyRef, RewardResult, Sample, Stop, Task

TASK = Task("t", ())


def episode(member: int, *, stop: Stop = "stop", samples: int = 1, reward: float | None = None) -> Episode:
    key = Key("train", 0, member)
    made = tuple(
        Sample(
            key._replace(branch=branch),
            np.arange(3),
            np.array([False, True, True]),
            np.array([0.0, -1.0, -2.0]),
            ((PolicyRef(), 2),),
            "stop",
        )
        for branch in range(samples)
    )
    result = None if reward is None else RewardResult(reward)
    return Episode(key, TASK, made, (), stop, reward=result, error="boom" if stop == "error" else "")


def test_each_stop_has_its_own_way() -> None:
    stops: tuple[Stop, ...] = ("stop", "length", "tool_limit", "abort", "error")
    assert [StopPolicy().action(stop) for stop in stops] == ["train", "train", "train", "drop", "drop"]
    strict = StopPolicy(length="drop", tool_limit="mask")
    assert [strict.action(stop) for stop in stops] == ["train", "drop", "mask", "drop", "drop"]
    judged, dropped = to_judge([episode(i, stop=stop) for i, stop in enumerate(stops)] + [episode(5, samples=0)], strict)
    assert [e.key.member for e in judged] == [0, 2]
    assert {key.member: reason for key, reason in dropped.items()} == {1: "length", 3: "abort", 4: "error", 5: "no_sample"}


@pytest.mark.parametrize("stop", ["abort", "error"])
def test_an_unfinished_sample_is_not_judged_whatever_its_agent_says(stop: Stop) -> None:
    """An agent gave up on a turn (its own time limit, say), went on in another branch, and calls the episode done."""
    whole = episode(0, samples=2)
    cut = replace(whole, samples=(replace(whole.samples[0], stop=stop), whole.samples[1]))
    assert to_judge([cut], StopPolicy()) == ([], {whole.key: stop})


def test_rows_carry_their_episode_s_reward_and_stop_and_masked_ones_train_nothing() -> None:
    episodes = [episode(0, reward=1.0, samples=2), episode(1, stop="length", reward=0.25)]
    rows = episode_rows(episodes, StopPolicy(length="mask"))
    assert rows.keys == (Key("train", 0, 0, 0), Key("train", 0, 0, 1), Key("train", 0, 1, 0))
    assert rows["rewards"].tolist() == [1.0, 1.0, 0.25]
    assert rows.objects("stop") == ("stop", "stop", "length")
    assert rows["mask"].tolist() == [False, True, True] * 2 + [False] * 3


def test_a_group_that_is_too_small_or_refused_goes_as_a_whole_with_each_reason() -> None:
    judged = [episode(0, reward=1.0), replace(episode(1), reward=RewardResult.failed("timeout"))]
    outcome = verdict(judged, {Key("train", 0, 2): "abort"}, min_episodes=2, keep=None)
    assert (outcome.kept, outcome.reason) == ((), "group_too_small")
    assert {key.member: reason for key, reason in outcome.dropped.items()} == {0: "group_too_small", 1: "reward_failed", 2: "abort"}
    assert verdict(judged, {}, min_episodes=1, keep=None).kept
    assert verdict([], {}, min_episodes=0, keep=None).reason == "group_too_small"
    same = [episode(0, reward=1.0), episode(1, reward=1.0)]
    assert verdict(same, {}, min_episodes=2, keep=lambda rewards: bool(rewards.std() > 0)).reason == "filtered"


def test_rewards_are_one_an_episode_and_values_only() -> None:
    with pytest.raises(RewardError, match="'t' gave 1 results for 2 episodes"):
        with_rewards(TASK, [episode(0), episode(1)], [RewardResult(1.0)])
    with pytest.raises(RewardError, match="token rewards"):
        with_rewards(TASK, [episode(0)], [RewardResult(1.0, token_rewards=((1, 0.5),))])


def test_metrics_are_over_what_they_name() -> None:
    judged = [
        replace(episode(0), reward=RewardResult(1.0, components={"format": 0.5})),
        replace(episode(1), reward=RewardResult.failed("timeout")),
    ]
    episodes = [*judged, episode(2, stop="error")]
    outcome = verdict(judged, {Key("train", 0, 2): "error"}, min_episodes=1, keep=None)
    metrics = group_metrics(episodes, judged, outcome)
    assert (metrics["reward/mean"].value, metrics["reward/mean"].count) == (1.0, 1)
    assert (metrics["reward/format"].value, metrics["reward/format"].count) == (0.5, 1)
    assert metrics["rollout/episodes"].value == 3
    assert metrics["rollout/dropped_reward_failed"].value == 1
    assert metrics["rollout/dropped_error"].value == 1
    assert metrics["rollout/stop_stop"].value == pytest.approx(2 / 3)
    assert metrics["rollout/length"].value == 2
