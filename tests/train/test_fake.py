from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.train.config import TrainConfig
from tandem.train.fake import FakeTrainEngine
from tandem.types import Key


def one_row() -> DataProto:
    """Two words, 0 1."""
    return DataProto.make(
        [Key("train", 0)],
        [2],
        token={"tokens": torch.tensor([0, 1]), "mask": torch.tensor([False, True]), "loss_weights": torch.tensor([0.0, 1.0])},
        row={"temperature": torch.ones(1)},
    )


def test_the_fake_can_be_checked_by_hand() -> None:
    """A step of 1 along the gradient of -log p(1 | 0)."""
    engine = FakeTrainEngine(2, TrainConfig(lr=1.0, max_grad_norm=math.inf))
    metrics, out = engine.forward_backward(one_row(), loss_ref(configure("sft")))
    assert out["logprobs"].tolist() == pytest.approx([0, math.log(0.5)])
    assert metrics["train/loss"].value == pytest.approx(math.log(2))
    engine.step()
    assert engine.table.tolist() == [[-0.5, 0.5], [0.0, 0.0]]


def test_weights_of_another_come_without_its_counts(tmp_path: Path) -> None:
    engine, other = (FakeTrainEngine(2, TrainConfig(lr=1.0, max_grad_norm=math.inf, warmup_steps=2)) for _ in range(2))
    other.forward_backward(one_row(), loss_ref(configure("sft")))
    other.step()
    other.save(tmp_path)
    engine.load_weights(tmp_path)
    assert torch.equal(engine.table, other.table)
    lrs: list[float] = []
    for each in (engine, other):
        each.forward_backward(one_row(), loss_ref(configure("sft")))
        lrs.append(each.step()["train/lr"].value)
    assert lrs == [0.5, 1.0]
