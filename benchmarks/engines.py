"""What engines in processes of their own give and cost: processor and wall time of the native engine, in turns of one run.

    python benchmarks/engines.py

256 requests for answers of log-normal length (median 24, sigma 1, at most 256) after prompts of 6 tokens, 8 to a prompt, all asked
at once; a decoder of 1.25 million parameters, random weights, float32, 64 slots an engine, one thread each. Sides:

    here     one engine in this process
    worker   one in a process of its own
    two      two, each in a process of its own, behind a router

A ratio is the processor time of the other by ours, all processes together: at equal processor time, how many answers more. Two
engines have fewer rows a step than one, and their answers cross a link. `wall` is the same of wall time, which needs two cores that
nobody else uses: there a second engine should give nearly twice as many. Medians of the rounds, and `spread` the smallest and the
largest. Prints a line a row and one JSON object at last; exits with 1 where a ratio misses its floor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lines import machine

from tandem.device import Hardware, configure_threads
from tandem.models.decoder import init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.ports import RolloutEngine
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.remote import EngineWorker, RemoteEngine
from tandem.rollout.router import Router
from tandem.runtime.placement import Rank, ResourcePool, place
from tandem.runtime.process import Processes
from tandem.types import GenerateRequest, Key, SamplingParams

SHAPE = DecoderConfig(
    vocab_size=128,
    hidden_size=160,
    intermediate_size=480,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=40,
    max_positions=512,
    attention_bias=True,
)
ENGINE = NativeConfig(slots=64, max_context=512)
NUM, PROMPT, GROUP, LONGEST = 256, 6, 8, 256
POOLS = ("worker", "two-0", "two-1")
Took = tuple[float, float]
"""Seconds of processors, and of the wall."""


@dataclass(frozen=True)
class All:
    """Of these engines each may be sampled from."""

    admitted: Sequence[RolloutEngine]


def engine() -> NativeEngine:
    return NativeEngine(init_decoder(SHAPE, 0), lambda tokens: "", ENGINE, exact=True)


def served(rank: Rank, pid: Path) -> EngineWorker:
    """pid: a file for the number of its process."""
    del rank
    pid.write_text(str(os.getpid()))
    return EngineWorker(engine())


def cpu_s(pid: int) -> float:
    """That a process has had so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def requests(seed: int) -> list[GenerateRequest]:
    draw = np.random.default_rng(seed)
    lengths = np.minimum(np.exp(draw.normal(np.log(24), 1, NUM)).astype(int) + 1, LONGEST)
    prompts = draw.integers(0, SHAPE.vocab_size, (NUM // GROUP, PROMPT)).tolist()
    return [
        GenerateRequest(
            Key("bench", i // GROUP, i % GROUP), tuple(prompts[i // GROUP]), SamplingParams(max_tokens=int(length)), seed
        )
        for i, length in enumerate(lengths)
    ]


async def seconds(side: RolloutEngine, pids: Sequence[int], asked: Sequence[GenerateRequest]) -> Took:
    async def one(request: GenerateRequest) -> int:
        return sum([len(chunk.tokens) async for chunk in side.generate(request)])

    wall, cpu = time.perf_counter(), sum(map(cpu_s, pids))
    found = await asyncio.gather(*map(one, asked))
    took = sum(map(cpu_s, pids)) - cpu, time.perf_counter() - wall
    assert found == [request.params.max_tokens for request in asked]
    return took


async def measure(rounds: int, place_of_pids: Path) -> dict[str, list[Took]]:
    """Of each side, round by round."""
    runtime = Processes(place([ResourcePool(name, 1) for name in POOLS], Hardware(len(POOLS))), place_of_pids)
    groups = {name: runtime.group(name, name, f"{__file__}:served", place_of_pids / f"{name}.pid") for name in POOLS}
    limits = {"vocab_size": SHAPE.vocab_size, "max_context": ENGINE.max_context}
    there = {name: RemoteEngine(group, **limits, capabilities=frozenset()) for name, group in groups.items()}
    router, both = Router(**limits, capabilities=frozenset()), [there["two-0"], there["two-1"]]
    router.serve(both, All(both))
    async with runtime:
        pids = {name: int((place_of_pids / f"{name}.pid").read_text()) for name in POOLS}
        sides: dict[str, tuple[RolloutEngine, list[int]]] = {
            "here": (engine(), [os.getpid()]),
            "worker": (there["worker"], [os.getpid(), pids["worker"]]),
            "two": (router, [os.getpid(), pids["two-0"], pids["two-1"]]),
        }
        found = {name: list[Took]() for name in sides}
        for side in sides.values():
            await seconds(*side, requests(0))
        for number in range(rounds):
            for name, side in sides.items():
                found[name].append(await seconds(*side, requests(number)))
            print({name: [round(each, 2) for each in took[-1]] for name, took in found.items()}, file=sys.stderr, flush=True)
        for each in there.values():
            await each.close()
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=7)
    rounds = options.parse_args().rounds
    configure_threads(1)
    with tempfile.TemporaryDirectory() as logs:
        found = asyncio.run(measure(rounds, Path(logs)))
    rows: list[dict[str, object]] = []
    for case, against, floor, stretch in (("two", "worker", 0.7, 0.9), ("worker", "here", 0.8, 0.95)):
        cpu, wall = (
            [other[which] / ours[which] for ours, other in zip(found[case], found[against], strict=True)] for which in (0, 1)
        )
        ratio, spread = round(statistics.median(cpu), 2), [round(min(cpu), 2), round(max(cpu), 2)]
        bounds = {"ratio": ratio, "floor": floor, "stretch": stretch, "pass": ratio >= floor, "spread": spread}
        rows.append({"case": case, "against": against, **bounds, "wall": round(statistics.median(wall), 2)})
        print(rows[-1])
    print(json.dumps({"benchmark": "engines", "machine": machine(), "rows": rows}))
    return 0 if all(row["pass"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
