from __future__ import annotations

import os
import subprocess
import sys

import torch

from tandem.train.adamw import AdamW
from tandem.train.config import TrainConfig


def test_steps_are_those_of_torch_to_the_bit() -> None:
    """Weights that get no gradient stay, and so does their state; learning rates differ from step to step."""
    config = TrainConfig(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    ours = {name: torch.randn(shape, generator=generator) for name, shape in {"a": (7, 5), "b": (3,), "c": (2, 2)}.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in ours.items()}
    mine = AdamW(ours, config)
    reference = torch.optim.AdamW(theirs.values(), betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True)
    for number, names in enumerate(("ab", "a", "abc", "bc")):
        for name in ours:
            gradient = torch.randn(ours[name].shape, generator=generator) if name in names else None
            ours[name].grad = gradient
            theirs[name].grad = None if gradient is None else gradient.clone()
        reference.param_groups[0]["lr"] = lr = 0.01 / (number + 1)
        reference.step()
        mine.step(lr)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), number
    for name, fields in mine.state.items():
        assert all(torch.equal(value, reference.state[theirs[name]][field]) for field, value in fields.items())


def test_it_does_without_the_compiler_whose_import_takes_seconds() -> None:
    script = """
import sys, torch
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.models.decoder import init_decoder
from tandem.models.decoder_config import DecoderConfig
engine = TorchEngine(init_decoder(DecoderConfig(8, 8, 16, 1, 1, 1, 8), 0), TrainConfig())
for parameter in engine.decoder.parameters():
    parameter.grad = torch.ones_like(parameter)
engine.step()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)
