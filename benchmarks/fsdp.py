"""Sharded training on two cores against one process on one: tokens a second of whole optimiser steps, both in one run.

    python benchmarks/fsdp.py   # the last line is JSON; exits with 1 where two ranks are below GOAL times one

A decoder of 10 million parameters, 16 rows of 64 to 256 tokens, GRPO with every column given, float32. `one` is a process
that holds the model alone and gets all rows; `sharded` are two ranks with half of the tokens each; `apart` are the same
two processes with the same halves, each with a model of its own and nothing to tell the other: what two cores can do
here at all. Ways take turns and the best of several rounds counts, since noise only adds time. A second row says the same by the
processor time of the slower rank, which other work on the machine does not take part in.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tandem import device
from tandem.algos.aggregation import loss_weights
from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.device import Hardware
from tandem.models.decoder import init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.ports import Collect, Dispatch, register
from tandem.runtime.dispatch import balanced
from tandem.runtime.placement import Rank, ResourcePool, place
from tandem.runtime.pool import PoolGroup
from tandem.runtime.process import Processes
from tandem.train.config import TrainConfig
from tandem.train.fsdp import FsdpConfig, fsdp_engine
from tandem.train.torch_engine import TorchEngine
from tandem.types import Key

GOAL, STRETCH, ROUNDS, LIMIT_S = 1.5, 1.8, 8, 600.0
SHAPE = DecoderConfig(
    vocab_size=4096,
    hidden_size=320,
    intermediate_size=896,
    num_layers=7,
    num_heads=5,
    num_kv_heads=5,
    head_dim=64,
    max_positions=512,
)
TRAIN = TrainConfig(micro_batch_tokens=1024)
LOSS = loss_ref(configure("grpo"))


def rows(ranks: int) -> DataProto:
    seeded = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 257, (16,), generator=seeded)
    num = int(lengths.sum())
    mask = torch.ones(num, dtype=torch.bool)
    mask[lengths.cumsum(0) - lengths] = False
    return DataProto.make(
        (Key("bench", i) for i in range(len(lengths))),
        lengths,
        token={
            "tokens": torch.randint(SHAPE.vocab_size, (num,), generator=seeded),
            "mask": mask,
            "old_logprobs": torch.full((num,), -8.3),
            "advantages": torch.randn(num, generator=seeded),
            "loss_weights": loss_weights(mask, lengths, ranks=ranks),
        },
        row={"temperature": torch.ones(len(lengths))},
    )


class Trainer:
    """One rank, with an engine that shares its model with the others and one that does not."""

    def __init__(self, rank: Rank) -> None:
        device.configure_threads(1)
        cpu = device.select("cpu")
        batch = rows(rank.size)
        self.part = batch.select(balanced(batch.lengths.tolist(), rank.size)[rank.index])
        self.engines = {
            "alone": TorchEngine(init_decoder(SHAPE, 0), TRAIN),
            "sharded": fsdp_engine(init_decoder(SHAPE, 0), TRAIN, FsdpConfig(), cpu, limit_s=LIMIT_S),
        }

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def step(self, engine: str) -> tuple[float, float]:
        """One optimiser step; its loss, and the processor time that it took here."""
        start = time.process_time()
        metrics, _ = self.engines[engine].forward_backward(self.part, LOSS)
        self.engines[engine].step()
        return metrics["train/loss"].value, time.process_time() - start


async def measure(logs: Path) -> dict[str, dict[str, float]]:
    """Tokens a second by clock and way."""
    num_tokens = rows(1).num_tokens
    runtime = Processes(place([ResourcePool("one", 1), ResourcePool("two", 2)], Hardware(cores=3)), logs, limit_s=LIMIT_S)
    one, two = [runtime.group("policy", pool, f"{__file__}:Trainer", collectives=True) for pool in ("one", "two")]
    async with runtime:
        ways: dict[str, tuple[PoolGroup, str]] = {"one": (one, "alone"), "sharded": (two, "sharded"), "apart": (two, "alone")}
        seconds = {clock: dict.fromkeys(ways, float("inf")) for clock in ("wall", "cpu")}
        for round_ in range(ROUNDS + 1):
            for way, (group, engine) in ways.items():
                start = time.perf_counter()
                losses, cpu = zip(*await group.call_each(Trainer.step, engine), strict=True)
                for clock, spent in (("wall", time.perf_counter() - start), ("cpu", max(cpu))):
                    if round_:  # the first warms up
                        seconds[clock][way] = min(seconds[clock][way], spent)
                if way == "sharded":
                    assert losses[0] == losses[1], losses
    return {clock: {way: num_tokens / spent for way, spent in found.items()} for clock, found in seconds.items()}


def main() -> int:
    with tempfile.TemporaryDirectory() as logs:
        rates = asyncio.run(measure(Path(logs)))
    lines = import_module("lines")  # not above: each worker process imports this file, and finds no others beside it
    print({clock: {way: round(rate) for way, rate in each.items()} for clock, each in rates.items()}, file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for clock, case in (("wall", "two ranks, wall"), ("cpu", "two ranks, processor time of the slower")):
        found = {way: round(rate) for way, rate in rates[clock].items()}
        ratio = rates[clock]["sharded"] / rates[clock]["one"]
        rows.append(
            lines.row(case, "one rank on one core", [ratio], GOAL, STRETCH, **{f"{way}_tokens_per_s": found[way] for way in found})
        )
    return lines.publish("fsdp", rows)


if __name__ == "__main__":
    sys.exit(main())
