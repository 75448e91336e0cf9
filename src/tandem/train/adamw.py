"""AdamW (arXiv 1711.05101) on PyTorch's fused kernel, with its state by parameter name.

    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    w = (1 - lr decay) w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

It is `torch.optim.AdamW(fused=True)` to the bit, whose class imports torch's compiler as it is made: two seconds of a run's start.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tandem.train.config import TrainConfig

FIELDS = ("step", "exp_avg", "exp_avg_sq")


class AdamW:
    """parameters: by name. state: of each parameter that has had a step, its FIELDS: t, m and v."""

    def __init__(self, parameters: Mapping[str, Tensor], config: TrainConfig) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self.state: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step of every parameter that has a gradient."""
        moved = {name: parameter for name, parameter in self._parameters.items() if parameter.grad is not None}
        for name, parameter in moved.items():
            if name not in self.state:
                moments = (torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(2))
                self.state[name] = dict(zip(FIELDS, (torch.zeros((), device=parameter.device), *moments), strict=True))
        beta1, beta2 = self._config.betas
        adamw(
            list(moved.values()),
            [parameter.grad for parameter in moved.values() if parameter.grad is not None],
            [self.state[name]["exp_avg"] for name in moved],
            [self.state[name]["exp_avg_sq"] for name in moved],
            [],
            [self.state[name]["step"] for name in moved],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=self._config.weight_decay,
            eps=self._config.eps,
            maximize=False,
        )
