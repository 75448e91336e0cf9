"""The learner: mini-batches are whole groups in a seeded order, and denominators are those of the optimiser step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.errors import EmptyBatchError
from tandem.queue.fake import FakeQueue
from tandem.runtime.inline import InlineGroup
from tandem.train.config import TrainConfig
from tandem.train.fake import FakeTrainEngine
from tandem.trainer.learner import LearnerConfig, MinibatchLearner, Trained
from tandem.trainer.workers import TrainWorker
from tandem.types import Algorithm, BatchRef, GroupKey, Key, Metrics, PolicyRef
from tests.trainer.world import TableEngine

SFT = configure("sft")


def rows(ordinals: range, *, masked: frozenset[int] = frozenset(), members: int = 2) -> DataProto:
    keys = [Key("train", o, m) for o in ordinals for m in range(members)]
    lengths = [1 + key.ordinal + key.member for key in keys]
    mask = torch.cat([torch.full((n,), key.ordinal not in masked) for n, key in zip(lengths, keys, strict=True)])
    return DataProto.make(
        keys,
        lengths,
        token={"tokens": torch.ones(sum(lengths), dtype=torch.int64), "mask": mask},
        row={"temperature": torch.ones(len(keys))},
    )


def update(
    data: DataProto, config: LearnerConfig, *, ranks: int = 1, averaged: int = 1, seed: int = 0, algorithm: Algorithm = SFT
) -> tuple[Metrics, TableEngine]:
    async def scenario() -> tuple[Metrics, TableEngine]:
        queue = FakeQueue()
        for group in dict.fromkeys(key.group for key in data.keys):
            await queue.reserve(GroupKey(*group), sum(key.group == group for key in data.keys))
        await queue.put(data)
        engine = TableEngine()
        worker = TrainWorker(engine, queue, algorithm, ranks=averaged)
        learner = MinibatchLearner([Trained(InlineGroup([worker] * ranks))], config, seed=seed)
        return await learner.update(data.ref(), PolicyRef()), engine

    return asyncio.run(scenario())


def test_minibatches_are_whole_groups_once_an_epoch_in_an_order_of_the_seed_s() -> None:
    orders: list[Any] = []
    for seed in (0, 0, 1):
        metrics, engine = update(rows(range(5)), LearnerConfig(epochs=2, minibatches=2), seed=seed)
        assert metrics["train/optimizer_steps"].value == engine.steps == 4
        seen = [[key.ordinal for key in part.keys] for part in engine.seen]
        assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == sorted([*range(5)] * 2)
        assert all(part.count(ordinal) == 2 for part in seen for ordinal in part)
        orders.append(seen)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:2] != orders[0][2:]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_token_weighs_the_same_on_any_number_of_ranks(aggregation: str) -> None:
    algorithm = configure("sft", {"aggregation": aggregation})
    weights: list[DataProto] = []
    for ranks in (1, 3):
        _, engine = update(rows(range(4)), LearnerConfig(), ranks=ranks, algorithm=algorithm)
        assert len(engine.seen) == ranks
        weights.append(DataProto.concat(engine.seen).by_keys(rows(range(4)).keys))
    assert torch.equal(weights[0]["loss_weights"], weights[1]["loss_weights"])


def test_weights_make_up_for_an_engine_that_averages_over_ranks() -> None:
    (once,), parts = (update(rows(range(4)), LearnerConfig(), ranks=ranks, averaged=ranks)[1].seen for ranks in (1, 2))
    averaged = DataProto.concat(parts).by_keys(once.keys)
    assert torch.equal(averaged["loss_weights"], 2 * once["loss_weights"])


def test_an_empty_minibatch_stops_the_run_or_is_counted() -> None:
    half = rows(range(2), masked=frozenset({0}))
    with pytest.raises(EmptyBatchError, match="nothing to train on"):
        update(half, LearnerConfig(minibatches=2))
    metrics, engine = update(half, LearnerConfig(minibatches=2, on_empty="skip"))
    assert metrics["train/skipped_empty"].value == engine.steps == 1
    with pytest.raises(EmptyBatchError, match="minibatches=3"):
        update(half, LearnerConfig(minibatches=3))


def test_data_rows_are_their_own_groups() -> None:
    _, engine = update(rows(range(4), members=1), LearnerConfig(minibatches=4))
    assert [len(part) for part in engine.seen] == [1] * 4


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"minibatches": 0}])
def test_config_says_what_is_wrong(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LearnerConfig(**bad)


def test_a_handle_can_be_cut() -> None:
    ref = rows(range(2)).ref()
    assert ref.select([3, 0]) == BatchRef((ref.keys[3], ref.keys[0]), ref.columns, (3, 1), (None, None))


class Recording(InlineGroup):
    """Keeps the handles of its calls."""

    def __init__(self, workers: list[Any]) -> None:
        super().__init__(workers)
        self.units: list[str] = []

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.units.append(args[0].unit)
        return await super().call(method, *args, **kwargs)


@pytest.mark.parametrize("unit", ["row", "group"])
def test_the_handle_says_what_stays_together(unit: Any) -> None:
    async def scenario() -> list[str]:
        queue, data = FakeQueue(), rows(range(2))
        for ordinal in range(2):
            await queue.reserve(GroupKey("train", ordinal), 2)
        await queue.put(data)
        group = Recording([TrainWorker(TableEngine(), queue, SFT)])
        await MinibatchLearner([Trained(group, unit)], LearnerConfig(minibatches=2), seed=0).update(data.ref(), PolicyRef())
        return group.units

    assert asyncio.run(scenario()) == [unit] * 4


@pytest.mark.parametrize("version", [0, 1])
def test_each_role_takes_its_own_step_and_the_policy_may_wait(version: int) -> None:
    """A critic's weights and metrics are its own; a policy before from_version is not trained, whoever sampled the batch."""

    async def scenario() -> tuple[Metrics, list[TableEngine], frozenset[str]]:
        queue, data, engines = FakeQueue(), rows(range(2)), [TableEngine(), TableEngine()]
        for ordinal in range(2):
            await queue.reserve(GroupKey("train", ordinal), 2)
        await queue.put(data)
        critic = Trained(InlineGroup([TrainWorker(engines[0], queue, configure("sft", {"aggregation": "token-sum"}), "critic")]))
        policy = Trained(InlineGroup([TrainWorker(engines[1], queue, SFT)]), from_version=1)
        batch = replace(data.ref(), policies=(PolicyRef(version=0),) * len(data))
        learner = MinibatchLearner([critic, policy], LearnerConfig(), seed=0)
        metrics = await learner.update(batch, PolicyRef(version=version))
        weights = await queue.get(data.keys, frozenset({"critic_loss_weights"}))
        assert torch.equal(weights["critic_loss_weights"], data["mask"].float())
        return metrics, engines, frozenset(metrics)

    metrics, (critic, policy), names = asyncio.run(scenario())
    assert critic.steps == 1
    assert policy.steps == version
    assert torch.equal(critic.seen[0]["loss_weights"], critic.seen[0]["mask"].float())
    assert {name.partition("/")[0] for name in names} == ({"critic", "train"} if version else {"critic"})
    assert metrics["critic/optimizer_steps"].value == 1
    if version:
        assert policy.seen[0]["loss_weights"].sum() == pytest.approx(1)


def test_an_update_measures_the_mismatch_that_no_pass_has_measured() -> None:
    """On its own logprobs, before its step: those of a table of zeros."""

    async def scenario() -> Metrics:
        queue, data = FakeQueue(), rows(range(2))
        mask = data["mask"].index_fill(0, torch.tensor(data.offsets[:-1]), False)
        sampled = torch.where(mask, torch.tensor(1 / 4).log() + 0.5, 0.0)
        data = data.with_columns(token={"mask": mask, "rollout_logprobs": sampled})
        for group in dict.fromkeys(key.group for key in data.keys):
            await queue.reserve(GroupKey(*group), sum(key.group == group for key in data.keys))
        await queue.put(data)
        worker = TrainWorker(FakeTrainEngine(4, TrainConfig(lr=1.0)), queue, SFT, against="rollout_logprobs")
        learner = MinibatchLearner([Trained(InlineGroup([worker]))], LearnerConfig(), seed=0)
        return await learner.update(data.ref(), PolicyRef())

    metrics = asyncio.run(scenario())
    assert metrics["mismatch/max"].value == pytest.approx(0.5)
    assert metrics["mismatch/tokens"].value == metrics["train/tokens"].value > 0
