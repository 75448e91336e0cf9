"""Evaluation: what is judged, what is counted, and the estimator of pass@k."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from tandem.agents.single_turn import SingleTurn
from tandem.data.fake import FakeDataset
from tandem.errors import DataError, EngineError, RewardError, RunError, StalledError
from tandem.ports import LLM, AgentLoop
from tandem.trainer.evaluate import EvalResult, EvaluationConfig, evaluate, pass_at_k
from tandem.types import Episode, Key, RewardResult, SamplingParams, Task
from tests.trainer.world import FunctionReward, TableEngine, TableLLM, TableRollout


def run(
    reward: Callable[[Episode], float | RewardResult] | None = None,
    agent: AgentLoop | None = None,
    *,
    size: int = 6,
    seed: int = 0,
    **config: Any,
) -> EvalResult:
    engine, rollout = TableEngine(), TableRollout()
    return asyncio.run(
        evaluate(
            FakeDataset(size=size),
            agent or SingleTurn(),
            FunctionReward(reward),
            lambda key, seed, params: TableLLM(engine, rollout, key, seed, params),
            SamplingParams(),
            EvaluationConfig(**config),
            seed=seed,
        )
    )


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 2), (4, 1, 2), (4, 4, 2), (5, 3, 1), (5, 2, 5), (6, 2, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int, c: int, k: int) -> None:
    subsets = list(combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(subset) < c for subset in subsets) / len(subsets))


def test_numbers_are_those_of_the_records() -> None:
    result = run(lambda episode: float(episode.key.member < 1 + episode.key.ordinal % 2), samples=4, pass_at=(2, 4))
    assert result.n == 6
    assert result.pass_at_1 == result.reward == pytest.approx((1 + 2) / 2 / 4)
    assert result.pass_at == {2: pytest.approx((pass_at_k(4, 1, 2) + pass_at_k(4, 2, 2)) / 2), 4: 1.0}
    assert result.greedy == 0.0
    assert result.failed == 0
    assert [episode.key for episode in result.episodes] == [Key("eval", i, member) for i in range(6) for member in range(4)]
    assert [episode.key for episode in result.greedy_episodes] == [Key("eval", i, 4) for i in range(6)]
    assert {episode.samples[0].temperature for episode in result.greedy_episodes} == {0.0}
    first = result.episodes[0]
    assert (first.task.id, len(first.completion), first.stop, first.reward) == ("fake-0", 2, "stop", RewardResult(1.0))
    metrics = result.metrics().values_by_name()
    assert metrics["pass@1"] == result.pass_at_1
    assert (metrics["n"], metrics["failed"], metrics["pass@4"], metrics["greedy"], metrics["cut_off"]) == (6, 0, 1.0, 0.0, 0.0)


def test_what_could_not_be_judged_is_counted_and_never_a_zero() -> None:
    async def agent(task: Task, llm: LLM, key: Key) -> Episode:
        if key.ordinal == 1:
            raise ValueError("no such tool")
        return await SingleTurn()(task, llm, key)

    def reward(episode: Episode) -> float | RewardResult:
        return RewardResult.failed("timeout") if episode.key.ordinal == 0 and episode.key.member == 1 else 1.0

    result = run(reward, agent, samples=2, pass_at=(2,), greedy=False)
    assert result.pass_at_1 == result.pass_at[2] == 1.0
    assert result.failed == 3
    reasons = [episode.reward.reason for episode in result.episodes if episode.reward is not None and not episode.reward.ok]
    assert reasons == ["timeout"] + ["ValueError: no such tool"] * 2
    assert result.greedy is None
    assert "greedy" not in result.metrics()
    with pytest.raises(RunError, match=r"none of 6 .* eval:0\.0\.0 \(task .fake-0.\): timeout"):
        run(lambda episode: RewardResult.failed("timeout"))
    with pytest.raises(RewardError, match=r"none of 6 .* eval:0\.0\.0 \(task .fake-0.\): KeyError; correct the reward"):
        run(lambda episode: RewardResult.failed("KeyError", raised=True))


def test_randomness_is_the_seed_s_and_the_task_s() -> None:
    def texts(**settings: Any) -> list[str]:
        return [episode.completion for episode in run(samples=2, **settings).episodes]

    assert texts() == texts(max_concurrent=1)
    assert texts() != texts(seed=1)
    assert texts(size=12, tasks=6) == texts()


def test_errors_and_silence_stop_the_evaluation() -> None:
    async def doomed(task: Task, llm: LLM, key: Key) -> Episode:
        raise EngineError("out of slots")

    async def asleep(task: Task, llm: LLM, key: Key) -> Episode:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(EngineError, match="out of slots"):
        run(agent=doomed)
    with pytest.raises(StalledError, match=r"0\.05 s for any of 12 tasks"):
        run(agent=asleep, stall_limit_s=0.05)
    with pytest.raises(DataError, match="'fake' has no tasks"):
        run(size=0)


@pytest.mark.parametrize("bad", [{"samples": 0}, {"pass_at": (2,)}, {"stall_limit_s": 0.0}, {"tasks": 0}, {"max_concurrent": 0}])
def test_config_says_what_is_wrong(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EvaluationConfig(**bad)
