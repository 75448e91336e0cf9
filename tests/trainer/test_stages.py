"""Stages: one advantage an episode, and how far sampler and trainer are apart."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.queue.fake import FakeQueue
from tandem.runtime.fake import FakeGroup
from tandem.trainer.stages import advantages, episode_advantages, model_outputs
from tandem.trainer.workers import TrainWorker, mismatch
from tandem.types import GroupKey, Key
from tests.trainer.world import TableEngine

GRPO = configure("grpo", {"scale": "none"})


def rows() -> DataProto:
    """Two groups; episode (0, 0) has three rows and must weigh as one."""
    keys = [
        Key("train", 0, 0, 0),
        Key("train", 1, 0),
        Key("train", 0, 1),
        Key("train", 0, 0, 1),
        Key("train", 1, 1),
        Key("train", 0, 0, 2),
    ]
    return DataProto.make(
        keys,
        [2] * 6,
        token={"mask": torch.tensor([False, True] * 5 + [False, False])},
        row={"rewards": torch.tensor([1.0, 5.0, 0.0, 1.0, 5.0, 1.0])},
    )


def test_statistics_count_episodes_and_every_row_of_one_gets_its_advantage() -> None:
    out, metrics = episode_advantages(rows(), GRPO)
    assert out["advantages"].view(6, 2).tolist() == [[0, 0.5], [0, 0], [0, -0.5], [0, 0.5], [0, 0], [0, 0]]
    assert metrics["train/groups_without_advantage"].value == 0.5
    assert metrics["train/advantage_abs"].value == 0.25


def test_rows_in_another_order_get_the_same_advantages() -> None:
    order = [5, 3, 1, 0, 4, 2]
    straight, _ = episode_advantages(rows(), GRPO)
    turned, _ = episode_advantages(rows().reorder(order), GRPO)
    assert torch.equal(turned["advantages"], straight.reorder(order)["advantages"])


def test_stages_write_their_column_to_the_queue_and_name_it_in_the_handle() -> None:
    async def scenario() -> None:
        queue = FakeQueue()
        for ordinal in range(2):
            await queue.reserve(GroupKey("train", ordinal), 2)
        full = rows().with_columns(
            token={"tokens": torch.zeros(12, dtype=torch.int64), "rollout_logprobs": torch.zeros(12)},
            row={"temperature": torch.ones(6)},
        )
        await queue.put(full)
        group = FakeGroup(TrainWorker(TableEngine(), queue, GRPO))
        batch = full.ref()
        for stage in (
            model_outputs("old_logprobs", group, {"old_logprobs": "logprobs"}, "current", against="rollout_logprobs"),
            advantages(GRPO, queue),
        ):
            batch, metrics = await stage.run(batch)
            assert stage.gives <= batch.columns
            assert metrics
        got = await queue.get(batch.keys, frozenset({"old_logprobs", "advantages"}))
        assert torch.allclose(got["old_logprobs"][full["mask"]], torch.tensor(0.25).log())
        assert [name for name, _ in group.calls] == ["forward"]

    asyncio.run(scenario())


def test_no_mismatch_is_exactly_none() -> None:
    logprobs = torch.tensor([-1.0, -2.0, float("nan")])
    metrics = mismatch(logprobs, logprobs.clone(), torch.tensor([True, True, False])).values_by_name()
    assert metrics == {"mismatch/k1": 0, "mismatch/k3": 0, "mismatch/ess": 1, "mismatch/max": 0, "mismatch/tokens": 0}
    assert not mismatch(logprobs, logprobs, torch.tensor([False] * 3))


def test_mismatch_estimates_the_divergence_of_the_sampler_from_the_trainer() -> None:
    sampler, trainer = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    counts = torch.tensor([2000, 2000])
    drawn = torch.repeat_interleave(torch.arange(2), counts)
    metrics = mismatch(sampler[drawn].log(), trainer[drawn].log(), torch.ones(4000, dtype=torch.bool)).values_by_name()
    kl = (sampler * (sampler / trainer).log()).sum().item()
    assert metrics["mismatch/k1"] == pytest.approx(kl, rel=1e-5)
    assert metrics["mismatch/k3"] == pytest.approx(kl, rel=1e-5)
    assert metrics["mismatch/max"] == pytest.approx(0.6931, rel=1e-3)
    assert metrics["mismatch/tokens"] == 4000
    assert metrics["mismatch/ess"] == pytest.approx(0.8, rel=1e-5)
