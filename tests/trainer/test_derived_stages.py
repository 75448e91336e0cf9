"""Stages that an algorithm's row asks for: columns made of a whole batch before it is split."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import torch

from tandem.algos.columns import step_needs
from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.queue.fake import FakeQueue
from tandem.trainer.plan import BatchStage, plan
from tandem.trainer.stages import advantages, bypass, derived, episode_advantages, resample
from tandem.types import Algorithm, GroupKey, Key

LENGTHS = [4, 3, 5, 2]
HAVE = frozenset({"tokens", "mask", "temperature", "rewards", "rollout_logprobs"})


def rows() -> DataProto:
    """Two groups of two episodes; the sampler and the trainer disagree a little."""
    total = sum(LENGTHS)
    seeded = torch.Generator().manual_seed(0)
    rollout = -torch.rand(total, generator=seeded)
    return DataProto.make(
        [Key("train", ordinal, member) for ordinal in range(2) for member in range(2)],
        LENGTHS,
        token={
            "tokens": torch.zeros(total, dtype=torch.int64),
            "mask": torch.tensor([position > 0 for length in LENGTHS for position in range(length)]),
            "rollout_logprobs": rollout,
            "old_logprobs": rollout + 0.1 * torch.randn(total, generator=seeded),
        },
        row={"rewards": torch.tensor([1.0, 0.0, 1.0, 0.5]), "temperature": torch.ones(4)},
    )


def run(algorithm: Algorithm, batch: DataProto, have: frozenset[str], *extra: Any, seed: int = 3) -> tuple[DataProto, str]:
    """The columns of the update after the plan has run, and the plan."""

    async def scenario() -> tuple[DataProto, str]:
        queue = FakeQueue()
        for ordinal in range(2):
            await queue.reserve(GroupKey("train", ordinal), 2)
        await queue.put(batch)
        known: list[BatchStage] = [
            advantages(algorithm, queue),
            *derived(algorithm, queue, seed=seed),
            *(make(queue) for make in extra),
        ]
        pipeline = plan(algorithm.needs, have, known)
        await pipeline.run(batch.ref())
        return await queue.get(batch.keys, algorithm.needs | step_needs(algorithm)), str(pipeline)

    return asyncio.run(scenario())


def test_a_correction_is_a_stage_before_the_update() -> None:
    got, pipeline = run(configure("grpo", {"correction": "icepop"}), rows(), HAVE | {"old_logprobs"})
    assert pipeline == "advantages -> correction"
    batch = rows()
    want = torch.where(batch["mask"], (batch["old_logprobs"] - batch["rollout_logprobs"]).exp(), 0.0)
    torch.testing.assert_close(got["correction"], want)


def test_token_rewards_come_before_the_advantages_that_need_them() -> None:
    got, pipeline = run(configure("reinforce_pp"), rows(), HAVE | {"old_logprobs"})
    assert pipeline == "token_rewards -> advantages"
    assert abs(float(got["advantages"][got["mask"]].mean())) < 1e-6


def test_bypass_takes_the_samplers_logprobs() -> None:
    algorithm = configure("grpo", {"bypass": True})
    batch = rows()
    without_old = batch.only(HAVE)
    got, pipeline = run(algorithm, without_old, HAVE, bypass)
    assert pipeline == "advantages -> bypass"
    assert torch.equal(got["old_logprobs"], batch["rollout_logprobs"])


def test_the_draw_of_clip_cov_depends_on_seed_and_key_and_not_on_order() -> None:
    algorithm = configure("clip_cov", {"cov_frac": 0.3, "cov_low": -10.0, "cov_high": 10.0})
    have = HAVE | {"old_logprobs"}
    straight, pipeline = run(algorithm, rows(), have)
    assert pipeline == "advantages -> random_covariant"
    assert int((straight["random_covariant"] > 0).sum()) == int(0.3 * int(rows()["mask"].sum()))
    order = [2, 0, 3, 1]
    turned, _ = run(algorithm, rows().reorder(order), have)
    assert torch.equal(turned["random_covariant"], straight.reorder(order)["random_covariant"])
    others = [run(algorithm, rows(), have, seed=seed)[0]["random_covariant"] for seed in range(4)]
    assert any(not torch.equal(other, straight["random_covariant"]) for other in others)


def test_resampling_draws_episodes_by_seed_and_key_and_not_by_order_or_rows() -> None:
    algorithm = configure("grpo", {"resampling": "max_random"})
    have = HAVE | {"old_logprobs"}

    def drawn(batch: DataProto, seed: int = 3) -> DataProto:
        return run(algorithm, batch, have, lambda queue: resample(algorithm, queue, seed=seed))[0]

    straight, order = drawn(rows()), [2, 0, 3, 1]
    assert float(straight["resample_counts"].sum()) == 4
    assert torch.equal(drawn(rows().reorder(order))["resample_counts"], straight.reorder(order)["resample_counts"])
    assert any(not torch.equal(drawn(rows(), seed)["resample_counts"], straight["resample_counts"]) for seed in range(4))

    one = rows().select([0])
    twin = replace(one, keys=(one.keys[0]._replace(branch=1),))
    branched = drawn(DataProto.concat([rows(), twin]))
    assert torch.equal(branched["resample_counts"][:4], straight["resample_counts"]), "two rows of one episode are one draw"
    assert branched["resample_counts"][4] == branched["resample_counts"][0]


def test_whitening_follows_a_baseline_that_counts_episodes() -> None:
    plain, _ = episode_advantages(rows(), configure("grpo", {"scale": "none"}))
    white, _ = episode_advantages(rows(), configure("reinforce_pp_baseline"))
    counted = plain["mask"]
    values = plain["advantages"][counted].double()
    want = (values - values.mean()) / (values.var() + 1e-8).sqrt()
    torch.testing.assert_close(white["advantages"][counted].double(), want, rtol=1e-5, atol=1e-6)
