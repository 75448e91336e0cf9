"""Cost grows as the work does: training against tokens, memory against tokens and rows, generation against slots and lengths.

    python benchmarks/growth.py      # the last line is JSON; exits with 1 where something grows faster than its work

One thread, a decoder of 1.25M parameters, one forward and backward pass a point in a process of its own, whose memory is the
peak resident set above what it was with model and optimiser made. Ratio: how many times the work by how many times the cost,
from the first point to the last; 1 is in proportion, more is cheaper. Generation is the median of five batches that fill all
slots, after prompts of 6 tokens, prefill included; its curves show tokens a CPU second. A turn of a conversation brings 32 tokens
from outside and 8 sampled ones, in 32 slots at once: an engine that read every turn from the beginning would read three times as
much a turn in eight turns as in two.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from lines import publish, row
from rollout import BENCH, job, tandem
from train import LOSS, SMALL, batch

from tandem.models.decoder import init_decoder
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.types import GenerateRequest, Key, SamplingParams

TOKENS = (1_024, 2_048, 4_096, 8_192)
LENGTH = 64
SLOTS = (1, 4, 16, 64, 256)
ANSWERS = (16, 64, 256)
TURNS = (2, 4, 8)
TOLD, SAID = 32, 8  # tokens of a turn: what comes from outside, and the answer


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def point(rows: int, length: int, micro_batch_tokens: int) -> tuple[float, int]:
    """(CPU seconds, bytes) of one pass over so many rows; the second of two, so that nothing is done for the first time."""
    torch.set_num_threads(1)
    engine = TorchEngine(init_decoder(SMALL, 0), TrainConfig(micro_batch_tokens=micro_batch_tokens))
    data = batch(rows, length, SMALL.vocab_size, prompt=1, group=1)
    engine.forward_backward(batch(2, 8, SMALL.vocab_size, prompt=1, group=1), LOSS)
    before, began_s = peak_bytes(), time.process_time()
    engine.forward_backward(data, LOSS)
    return time.process_time() - began_s, peak_bytes() - before


def generation(slots: int, length: int) -> float:
    """CPU seconds of answers of `length` tokens in all slots."""
    torch.set_num_threads(1)
    call, of = tandem(init_decoder(BENCH, 0), slots), job(0, slots, slots, length)
    return statistics.median([call(of) for _ in range(6)][1:])


def conversations(turns: int) -> float:
    """CPU seconds of 32 conversations at once, each of so many turns, when the engine has seen turns before."""
    torch.set_num_threads(1)
    engine = NativeEngine(init_decoder(BENCH, 0), lambda _: "", NativeConfig(slots=32, max_context=512), exact=True)

    async def one(row: int, ordinal: int) -> None:
        tokens, params = list[int](), SamplingParams(max_tokens=SAID)
        for turn in range(turns):
            tokens += [3 + (7 * row + place * (turn + 3)) % 90 for place in range(TOLD)]
            request = GenerateRequest(Key("bench", ordinal + row), tuple(tokens), params, 0, turn)
            async for chunk in engine.generate(request):
                tokens += chunk.tokens

    async def all_of(ordinal: int) -> float:
        began_s = time.process_time()
        await asyncio.gather(*(one(row, ordinal) for row in range(32)))
        return time.process_time() - began_s

    async def both() -> float:
        await all_of(0)
        return await all_of(32)

    return asyncio.run(both())


def generates(case: str, x: str, points: list[tuple[int, int]], varied: int, limits: tuple[float, float]) -> dict[str, Any]:
    """points: (slots, length); varied: which of the two grows."""
    found = [(point, generation(*point)) for point in points]
    (first, low), (last, high) = found[0], found[-1]
    curve = {"x": x, "y": "tokens a CPU s", "points": [(point[varied], round(point[0] * point[1] / s)) for point, s in found]}
    return row(case, "growth in proportion", [(last[varied] / first[varied]) / (high / low)], *limits, curve=curve)


def in_process(*what: int) -> tuple[float, int]:
    done = subprocess.run([sys.executable, __file__, *map(str, what)], stdout=subprocess.PIPE, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def grows(case: str, x: str, y: str, points: list[tuple[int, float]], floor: float, stretch: float) -> dict[str, Any]:
    (first, low), (last, high) = points[0], points[-1]
    curve = {"x": x, "y": y, "points": [(at, round(value, 3)) for at, value in points]}
    return row(case, "growth in proportion", [(last / first) / (high / low)], floor, stretch, curve=curve)


def main() -> int:
    if len(sys.argv) == 4:
        print(json.dumps(point(*map(int, sys.argv[1:]))))
        return 0
    whole = [(tokens, in_process(tokens // LENGTH, LENGTH, tokens)) for tokens in TOKENS]
    bounded = [(tokens // LENGTH, in_process(tokens // LENGTH, LENGTH, 1_024)) for tokens in TOKENS]
    return publish(
        "growth",
        [
            grows("training time", "tokens", "CPU s", [(tokens, seconds) for tokens, (seconds, _) in whole], 0.9, 1.0),
            grows("memory of a pass", "tokens of one micro-batch", "MiB", [(t, size / 2**20) for t, (_, size) in whole], 0.9, 1.0),
            grows(
                "memory of more rows",
                "rows, 1,024 tokens a micro-batch",
                "MiB",
                [(n, s / 2**20) for n, (_, s) in bounded],
                4.0,
                8.0,
            ),
            generates("generation with more slots", "slots, 32 tokens each", [(n, 32) for n in SLOTS], 0, (24.0, 40.0)),
            generates("generation of longer answers", "tokens, 32 slots", [(32, n) for n in ANSWERS], 1, (0.4, 0.6)),
            grows("conversations of more turns", "turns", "CPU s", [(turns, conversations(turns)) for turns in TURNS], 0.7, 0.9),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
