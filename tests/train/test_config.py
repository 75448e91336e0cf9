from __future__ import annotations

import math

import pytest

from tandem.train.config import TrainConfig, learning_rate


def rates(config: TrainConfig, num: int) -> list[float]:
    return [learning_rate(config, update) for update in range(num)]


def test_constant_after_a_linear_rise() -> None:
    assert rates(TrainConfig(lr=0.5), 2) == [0.5, 0.5]
    assert rates(TrainConfig(lr=1.0, warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_zero_after_the_last_update() -> None:
    assert rates(TrainConfig(lr=1.0, schedule="linear", warmup_steps=2, total_steps=6), 8) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    got = rates(TrainConfig(lr=2.0, schedule="cosine", total_steps=4), 5)
    assert got == pytest.approx([2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"lr": math.inf}, "lr must be positive"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"max_nonfinite": -1}, "max_nonfinite"),
        ({"schedule": "linear", "warmup_steps": 5, "total_steps": 5}, "above warmup_steps=5, or 0, got 5"),
    ],
)
def test_values_out_of_range(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrainConfig(**wrong)  # type: ignore[arg-type]


def test_a_schedule_without_an_end_takes_the_run_s() -> None:
    open_ended = TrainConfig(schedule="linear", warmup_steps=1)
    assert open_ended.over(5).total_steps == 5
    assert TrainConfig(schedule="linear", total_steps=3).over(5).total_steps == 3
    assert TrainConfig().over(5) == TrainConfig()
    with pytest.raises(ValueError, match="total_steps"):
        learning_rate(open_ended, 1)
