"""Adaptive KL coefficients: what a batch's KL makes of them, by hand, in the loop and over a resume."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.errors import NonFiniteError
from tandem.queue.fake import FakeQueue
from tandem.trainer.kl_control import KLControls
from tandem.types import Algorithm, GroupKey, Key, Metrics

GRPO = configure("grpo", {"kl_coef": 0.5, "kl_target": 0.25, "kl_horizon": 10, "kl_estimator": "k2"})
BOTH: dict[str, Any] = {
    "kl_coef": 0.5,
    "kl_target": 0.25,
    "kl_horizon": 10,
    "reward_kl_coef": 1.0,
    "reward_kl_target": 2.0,
    "reward_kl_horizon": 5,
}


def batch(ordinal: int, gap: float, *, mask: bool = True) -> DataProto:
    """Two episodes, one of them of two rows; the policy is `gap` above the reference on every token that counts."""
    keys = [Key("train", ordinal, 0, 0), Key("train", ordinal, 0, 1), Key("train", ordinal, 1, 0)]
    counted = torch.tensor([False, True, True, False, False, True]) & mask
    ref = torch.full((6,), -2.0)
    old = torch.where(counted, ref + gap, 77.0)
    return DataProto.make(keys, [3, 2, 1], token={"mask": counted, "old_logprobs": old, "ref_logprobs": ref})


def apply(controls: KLControls, rows: DataProto) -> tuple[dict[str, list[float]], Metrics]:
    """The columns that a batch gets, and metrics."""

    async def scenario() -> tuple[dict[str, list[float]], Metrics]:
        queue, metrics = FakeQueue(), Metrics()
        await queue.reserve(GroupKey("train", rows.keys[0].ordinal), 2)
        await queue.put(rows)
        columns: dict[str, list[float]] = {}
        for stage in controls.stages(queue):
            ref, measured = await stage.run(rows.ref())
            assert stage.gives <= ref.columns
            metrics += measured
            (column,) = stage.gives
            columns[column] = (await queue.get(rows.keys, stage.gives))[column].tolist()
        return columns, metrics

    return asyncio.run(scenario())


def test_a_batch_has_the_coefficient_of_the_batches_before_it() -> None:
    """Two episodes of a horizon of ten; k2 is gap^2 / 2, of which a target of 0.25 is missed by at most a fifth."""
    controls = KLControls(GRPO)
    seen: list[float] = []
    for ordinal, gap in enumerate((2.0, 0.75, 0.5, 0.0)):
        columns, metrics = apply(controls, batch(ordinal, gap))
        (coef,) = set(columns["kl_coef"])
        seen.append(coef)
        assert metrics["train/kl_coef"].value == pytest.approx(coef)
        assert metrics["train/kl_coef_follows"].value == pytest.approx(gap**2 / 2)
    assert seen == pytest.approx([0.5, 0.5 * 1.04, 0.5 * 1.04 * (1 + 0.125 * 0.2), 0.5 * 1.04 * 1.025 * 0.96])


def test_loss_and_reward_have_coefficients_of_their_own() -> None:
    controls = KLControls(configure("reinforce_pp", BOTH))
    columns, _ = apply(controls, batch(0, 1.0))
    assert columns == {"kl_coef": [0.5] * 3, "reward_kl_coef": [1.0] * 3}
    columns, _ = apply(controls, batch(1, 1.0))
    assert columns["kl_coef"] == pytest.approx([0.5 * 1.04] * 3)  # k3 of 1 is 0.37, above 0.25
    assert columns["reward_kl_coef"] == pytest.approx([1 - 0.2 * 2 / 5] * 3)  # k1 of 1 is below 2


@pytest.mark.parametrize("algorithm", [GRPO, configure("reinforce_pp", BOTH)], ids=lambda chosen: chosen.name)
def test_a_resumed_run_has_the_same_coefficients(algorithm: Algorithm) -> None:
    whole, first, second = KLControls(algorithm), KLControls(algorithm), KLControls(algorithm)
    want = [apply(whole, batch(ordinal, 1.0 + ordinal))[0] for ordinal in range(4)]
    assert [apply(first, batch(ordinal, 1.0 + ordinal))[0] for ordinal in range(2)] == want[:2]
    second.restore(json.loads(json.dumps(first.state())))
    assert [apply(second, batch(ordinal, 1.0 + ordinal))[0] for ordinal in range(2, 4)] == want[2:]


def test_a_batch_without_a_token_moves_nothing_and_a_number_that_is_none_is_an_error() -> None:
    controls = KLControls(GRPO)
    assert not apply(controls, batch(0, 3.0, mask=False))[1]["train/kl_coef_follows"].count
    assert controls.state() == {"kl_coef": 0.5}
    with pytest.raises(NonFiniteError, match=r"column 'old_logprobs' is inf at token 1 of row train:1\.0\.0"):
        apply(controls, batch(1, torch.inf))


def test_a_fixed_coefficient_needs_no_stage() -> None:
    fixed = KLControls(configure("grpo", {"kl_coef": 0.1}))
    assert fixed.stages(FakeQueue()) == ()
    assert fixed.state() == {}
