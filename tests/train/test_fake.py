from __future__ import annotations

import math

import pytest
import torch

from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.train.config import TrainConfig
from tandem.train.fake import FakeTrainEngine
from tandem.types import Key


def test_the_fake_can_be_checked_by_hand() -> None:
    """Two words, one row 0 1: a step of 1 along the gradient of -log p(1 | 0)."""
    engine = FakeTrainEngine(2, TrainConfig(lr=1.0, max_grad_norm=math.inf))
    batch = DataProto.make(
        [Key("train", 0)],
        [2],
        token={"tokens": torch.tensor([0, 1]), "mask": torch.tensor([False, True]), "loss_weights": torch.tensor([0.0, 1.0])},
        row={"temperature": torch.ones(1)},
    )
    metrics, out = engine.forward_backward(batch, loss_ref(configure("sft")))
    assert out["logprobs"].tolist() == pytest.approx([0, math.log(0.5)])
    assert metrics["train/loss"].value == pytest.approx(math.log(2))
    engine.step()
    assert engine.table.tolist() == [[-0.5, 0.5], [0.0, 0.0]]
