"""How a model is optimised: settings of a training engine, and the learning rate of each update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a TrainEngine.

    lr, betas, eps, weight_decay: of AdamW, for every parameter. schedule: how the learning rate goes down after
    `warmup_steps` updates of rising linearly; "linear" and "cosine" reach 0 after `total_steps` updates (0: when the run ends).
    max_grad_norm: the gradient's global norm is scaled down to it; .inf is off. micro_batch_tokens: tokens of one pass through
    the model, with padding where it pads (library=transformers); a longer row passes alone. activation_checkpointing: compute
    each layer again in the backward pass instead of keeping what it computed: less memory, about a quarter more time.
    top_layers: train the last so many layers and what comes after them, and leave all before as it is; 0 is the whole model.
    max_nonfinite: how many steps in a row may be refused for a NaN or an infinity before the run stops.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 4096
    activation_checkpointing: bool = False
    top_layers: int = 0
    max_nonfinite: int = 3

    def __post_init__(self) -> None:
        for good, complaint in (
            (0 < self.lr < math.inf, f"lr must be positive, got {self.lr}"),
            (all(0 <= beta < 1 for beta in self.betas), f"betas must be in [0, 1), got {self.betas}"),
            (self.eps > 0, f"eps must be positive, got {self.eps}"),
            (self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}"),
            (self.warmup_steps >= 0, f"warmup_steps must not be negative, got {self.warmup_steps}"),
            (self.max_grad_norm > 0, f"max_grad_norm must be positive (.inf is off), got {self.max_grad_norm}"),
            (self.micro_batch_tokens > 0, f"micro_batch_tokens must be positive, got {self.micro_batch_tokens}"),
            (self.top_layers >= 0, f"top_layers must not be negative (0 is the whole model), got {self.top_layers}"),
            (self.max_nonfinite >= 0, f"max_nonfinite must not be negative, got {self.max_nonfinite}"),
            (
                self.total_steps > self.warmup_steps or self.total_steps == 0,
                f"total_steps must be above warmup_steps={self.warmup_steps}, or 0, got {self.total_steps}",
            ),
        ):
            if not good:
                raise ValueError(complaint)

    def over(self, updates: int) -> TrainConfig:
        """The same, its schedule ending with a run of this many updates unless it says where it ends itself."""
        decays = self.schedule != "constant" and self.total_steps == 0 and updates > self.warmup_steps
        return replace(self, total_steps=updates) if decays else self


def learning_rate(config: TrainConfig, update: int) -> float:
    """Of update number `update`, counted from 0: lr (update + 1) / warmup_steps while warming up, then the schedule."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.total_steps == 0:
        raise ValueError(f"schedule={config.schedule} has no end: give total_steps, or the run's updates to TrainConfig.over")
    done = min((update - config.warmup_steps) / (config.total_steps - config.warmup_steps), 1.0)
    return config.lr * (1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)
