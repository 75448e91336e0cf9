"""Law 12: NaN, an empty batch, a truncated prompt, an unknown key, a dropped sample: errors, or counted by name.

And metrics carry (sum, count), so that a mean is divided once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tandem.agents.single_turn import SingleTurn
from tandem.algos.table import configure
from tandem.data.fake import FakeDataset
from tandem.data_proto import DataProto
from tandem.errors import DataError, EmptyBatchError, NonFiniteError, QueueError
from tandem.ports import LLM, AgentLoop, Collect, Dispatch, register
from tandem.queue.fake import FakeQueue
from tandem.rollout.fake import FakeEngine
from tandem.rollout.session import Session
from tandem.runtime.inline import InlineGroup
from tandem.text.fake import FakeRenderer
from tandem.trainer.dataset import DatasetSource, Demonstrations
from tandem.trainer.learner import LearnerConfig, MinibatchLearner, Trained
from tandem.trainer.rows import StopPolicy
from tandem.trainer.source import RolloutConfig
from tandem.trainer.workers import TrainWorker
from tandem.types import (
    BatchRef,
    Episode,
    GroupKey,
    Key,
    Message,
    Metric,
    Metrics,
    PolicyRef,
    RewardResult,
    Sample,
    SamplingParams,
    Task,
)
from tests.laws.breaking import Breaker
from tests.trainer.world import TableEngine, world


def refused(error: type[Exception], call: Callable[[], object]) -> str:
    """The message of the `error` that `call` raises; anything else breaks the law."""
    try:
        call()
    except error as problem:
        return str(problem)
    except Exception as problem:
        raise AssertionError(f"{type(problem).__name__} instead of {error.__name__}: {problem}") from problem
    raise AssertionError(f"no {error.__name__}")


# ------------------------------------------------------------------------------------------------------- NaN


def check_a_number_that_is_none_is_refused_where_it_appears() -> None:
    assert "nan" in refused(NonFiniteError, lambda: RewardResult(math.nan))
    assert "inf" in refused(NonFiniteError, lambda: RewardResult(1.0, {"format": math.inf}))
    for bad in (math.nan, math.inf, 0.5):
        message = refused(NonFiniteError, lambda bad=bad: sample(bad))
        assert "train:3.1.0" in message


def sample(logprob: float) -> Sample:
    return Sample(Key("train", 3, 1), np.array([1]), np.array([True]), np.array([logprob]), ((PolicyRef(), 1),), "stop")


# ----------------------------------------------------------------------------------------------- empty batch


async def _update(data: DataProto, config: LearnerConfig) -> Metrics:
    queue = FakeQueue()
    for key in data.keys:
        await queue.reserve(key.group, 1)
    await queue.put(data)
    learner = MinibatchLearner([Trained(InlineGroup([TrainWorker(TableEngine(), queue, configure("sft"))]))], config, seed=0)
    return await learner.update(data.ref(), PolicyRef())


def masked_rows(num: int) -> DataProto:
    return DataProto.make(
        [Key("train", i) for i in range(num)],
        [1] * num,
        token={"tokens": torch.zeros(num, dtype=torch.int64), "mask": torch.zeros(num, dtype=torch.bool)},
        row={"temperature": torch.ones(num)},
    )


def check_a_step_without_tokens_is_an_error_or_a_counted_skip() -> None:
    assert "nothing to train on" in refused(EmptyBatchError, lambda: asyncio.run(_update(masked_rows(3), LearnerConfig())))
    skipped = asyncio.run(_update(masked_rows(3), LearnerConfig(on_empty="skip")))
    assert skipped.values_by_name() == {"train/skipped_empty": 1}


def check_masking_does_not_empty_a_batch_unseen() -> None:
    """Every episode runs out of tokens and length is masked: the run stops and says so."""

    async def endless(task: Task, llm: LLM, key: Key) -> Episode:
        return replace(await SingleTurn()(task, llm, key), stop="length")

    made = world(agent=endless, config=RolloutConfig(2, 3, stops=StopPolicy(length="mask")))

    async def step() -> None:
        async with aclosing(aiter(made.source)) as batches:
            batch = await anext(batches)
            await made.plan.run(batch)
            await made.learner.update(batch, PolicyRef())

    refused(EmptyBatchError, lambda: asyncio.run(step()))


# ------------------------------------------------------------------------------------------ truncated prompt


def check_a_prompt_that_does_not_fit_names_its_task() -> None:
    engine = FakeEngine([ord("a")], max_context=8)

    async def step() -> None:
        made = world(dataset=FakeDataset([Task("long", (Message("user", "?" * 9),))]))
        made.source._make_llm = lambda key, seed, params: Session(
            engine, FakeRenderer(), key, SamplingParams(max_tokens=4), seed=seed, max_context=8
        )
        async with aclosing(aiter(made.source)) as batches:
            await anext(batches)

    message = refused(DataError, lambda: asyncio.run(step()))
    assert "'long'" in message
    assert "8" in message


def check_a_demonstration_that_does_not_fit_names_its_task() -> None:
    task = Task("long", (Message("user", "?"), Message("assistant", "a" * 20)))

    async def step() -> None:
        source = DatasetSource(
            dataset=FakeDataset([task]),
            maker=Demonstrations(FakeRenderer(), max_context=16),
            queue=FakeQueue(),
            tasks_per_step=1,
            seed=0,
            policy=PolicyRef(),
        )
        async with aclosing(aiter(source)) as batches:
            await anext(batches)

    message = refused(DataError, lambda: asyncio.run(step()))
    assert "'long'" in message
    assert "16" in message


# ----------------------------------------------------------------------------- unknown keys, dropped samples


def check_an_unknown_key_is_refused() -> None:
    async def use(act: Callable[[FakeQueue], Any]) -> None:
        queue = FakeQueue()
        await queue.reserve(GroupKey("train", 0), 1)
        await act(queue)

    stranger = masked_rows(8).select([7])
    for act in (
        lambda queue: queue.put(stranger),
        lambda queue: queue.write(stranger),
        lambda queue: queue.get(stranger.keys, frozenset({"tokens"})),
        lambda queue: queue.drop(stranger.keys, "abort"),
    ):
        assert "train:7.0.0" in refused(QueueError, lambda act=act: asyncio.run(use(act)))


def check_every_admitted_episode_is_trained_on_or_counted_as_dropped() -> None:
    async def agent(task: Task, llm: LLM, key: Key) -> Episode:
        episode = await SingleTurn()(task, llm, key)
        return replace(episode, stop="abort") if key.member == 0 else episode

    def reward(episode: Episode) -> float | RewardResult:
        return RewardResult.failed("timeout") if episode.key.member == 1 else float(episode.key.ordinal % 2 and episode.key.member)

    made = world(algorithm="dapo", agent=agent, reward=reward, config=RolloutConfig(2, 5))

    async def step() -> tuple[BatchRef, Metrics]:
        async with aclosing(aiter(made.source)) as batches:
            batch = await anext(batches)
            return batch, await made.source.advance(PolicyRef(version=1))

    batch, metrics = asyncio.run(step())
    for prefix in ("rollout/dropped_", "queue/dropped/"):
        dropped = {name: m.value for name, m in metrics.items() if name.startswith(prefix) and not name.endswith("groups")}
        assert {name.removeprefix(prefix) for name in dropped} == {"abort", "reward_failed", "filtered"}
        assert metrics["rollout/episodes"].value == len(batch.keys) + sum(dropped.values())


# --------------------------------------------------------------------------------------------------- metrics


class _Counter:
    """A worker that reports a mean over its rows."""

    @register(Dispatch.SPLIT, Collect.SUM)
    async def report(self, rows: DataProto) -> Metrics:
        return Metrics.mean({"length": rows.lengths.double().mean().item()}, len(rows))


def check_a_mean_is_divided_once() -> None:
    lengths = [9, 1, 1, 1, 1]
    rows = DataProto.make([Key("train", i) for i in range(5)], lengths, token={"x": torch.zeros(sum(lengths))})
    for ranks in (1, 2, 3):
        metrics = asyncio.run(InlineGroup([_Counter()] * ranks).call(_Counter.report, rows))
        assert math.isclose(metrics["length"].value, sum(lengths) / 5), f"{metrics} on {ranks} ranks"


def test_a_number_that_is_none_is_refused_where_it_appears() -> None:
    check_a_number_that_is_none_is_refused_where_it_appears()


def test_a_step_without_tokens_is_an_error_or_a_counted_skip() -> None:
    check_a_step_without_tokens_is_an_error_or_a_counted_skip()


def test_masking_does_not_empty_a_batch_unseen() -> None:
    check_masking_does_not_empty_a_batch_unseen()


def test_a_prompt_that_does_not_fit_names_its_task() -> None:
    check_a_prompt_that_does_not_fit_names_its_task()


def test_a_demonstration_that_does_not_fit_names_its_task() -> None:
    check_a_demonstration_that_does_not_fit_names_its_task()


def test_an_unknown_key_is_refused() -> None:
    check_an_unknown_key_is_refused()


def test_every_admitted_episode_is_trained_on_or_counted_as_dropped() -> None:
    check_every_admitted_episode_is_trained_on_or_counted_as_dropped()


def test_a_mean_is_divided_once() -> None:
    check_a_mean_is_divided_once()


# -------------------------------------------------------------------------------------------------- breakers


@register(Dispatch.RANK_ZERO, Collect.FIRST)
async def _weighs_nothing_as_zero(self: TrainWorker, batch: BatchRef) -> Metrics:
    rows = await self._queue.get(batch.keys, frozenset({"mask"}))
    await self._queue.write(rows.only([]).with_columns(token={"policy_loss_weights": torch.zeros(rows.num_tokens)}))
    return Metrics()


async def _swallows_every_error(agent: AgentLoop, task: Task, llm: LLM, key: Key) -> Episode:
    try:
        return await agent(task, llm, key)
    except Exception:  # noqa: BLE001
        return Episode(key, task, (), (), "error")


BREAKERS = [
    Breaker(
        12,
        "NaN rewards pass",
        "tandem.types:RewardResult.__post_init__",
        lambda self: None,
        check_a_number_that_is_none_is_refused_where_it_appears,
    ),
    Breaker(
        12,
        "an empty step has weights of zero",
        "tandem.trainer.workers:TrainWorker.weigh",
        _weighs_nothing_as_zero,
        check_a_step_without_tokens_is_an_error_or_a_counted_skip,
    ),
    Breaker(
        12,
        "masked steps pass",
        "tandem.trainer.workers:TrainWorker.weigh",
        _weighs_nothing_as_zero,
        check_masking_does_not_empty_a_batch_unseen,
    ),
    Breaker(
        12,
        "a prompt that does not fit is one more failed episode",
        "tandem.trainer.source:run_episode",
        _swallows_every_error,
        check_a_prompt_that_does_not_fit_names_its_task,
    ),
    Breaker(
        12,
        "unknown keys pass",
        "tandem.queue.ledger:Ledger._check_known",
        lambda self, keys, what: None,
        check_an_unknown_key_is_refused,
    ),
    Breaker(
        12,
        "drops are not counted",
        "tandem.trainer.source:group_metrics",
        lambda episodes, judged, outcome: Metrics.sum({"rollout/episodes": len(episodes)}),
        check_every_admitted_episode_is_trained_on_or_counted_as_dropped,
    ),
    Breaker(
        12,
        "a mean of means",
        "tandem.types:Metric.__add__",
        lambda self, other: Metric((self.value + other.value) / 2),
        check_a_mean_is_divided_once,
    ),
]
