"""What the native engine's generation costs beside others: CPU seconds on one thread, in turns of one run.

    pip install 'transformers>=5.16,<6'     # in any environment; vLLM's CPU build in one of its own
    python benchmarks/rollout.py --transformers-python .venv/bin/python --vllm-python vllm/bin/python

Requests for answers of a given length after prompts of 6 tokens, 8 to a prompt, with a logprob a token: `ragged` are 128 of a
log-normal length (median 24, sigma 1, at most 256), of others the length is said. A decoder of 1.25 million parameters in
Qwen2's shape, random weights, float32. Against:

    transformers   `generate` on static batches of as many rows as there are slots, each to its longest answer
    vllm           vLLM's engine in its own process, logprobs on (it refuses heads of 40, so this model's are 32)
    floor          benchmarks/floors/rollout.py: plain torch without exactness or an engine's duties
    plain          this engine with the rules of models/numerics taken out
    products       one decode step in the shape of SmolLM2-135M, bfloat16, 64 rows: its products with weights alone

A ratio is the other's time by ours: larger is better. `spread` are the smallest and the largest of the rounds. Prints a line a
row and one JSON object at last; exits with 1 where a ratio is below its floor. A side whose Python is not given is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from turns import ONE_THREAD, Side, by_turns

from tandem.models import decoder as decoders
from tandem.models import heads, kv_cache, numerics
from tandem.models.decoder import Decoder, init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.models.hf import save_decoder
from tandem.models.kv_cache import KVCache
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.types import GenerateRequest, Key, SamplingParams

PROMPT, GROUP, LONGEST = 6, 8, 256
SHAPE = {"vocab_size": 128, "hidden_size": 160, "intermediate_size": 480, "num_layers": 4, "attention_bias": True}
BENCH = DecoderConfig(**SHAPE, num_heads=4, num_kv_heads=2, head_dim=40, max_positions=512)
OF_VLLM = DecoderConfig(**SHAPE, num_heads=5, num_kv_heads=1, head_dim=32, max_positions=512)
SMOL = DecoderConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100_000.0,
)
SMOL_ROWS, SMOL_PROMPT = 64, 48

Job = dict[str, Any]
Call = Callable[[Job], float]


def job(seed: int, slots: int, num: int, length: int | None = None) -> Job:
    """One batch of requests; log-normal lengths where none is given."""
    drawn = np.random.default_rng(seed)
    prompts = drawn.integers(3, 99, (-(-num // GROUP), PROMPT)).repeat(GROUP, 0)[:num]
    ragged = np.clip(np.round(24 * np.exp(drawn.standard_normal(num))), 1, LONGEST).astype(int)
    return {"rows": prompts.tolist(), "lengths": ragged.tolist() if length is None else [length] * num, "slots": slots}


def spent(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def tandem(model: Decoder, slots: int) -> Call:
    engine = NativeEngine(model, lambda _: "", NativeConfig(slots=slots, max_context=PROMPT + LONGEST), exact=True)

    async def one(row: int, of: Job) -> int:
        key, params = Key("bench", row // GROUP, row % GROUP), SamplingParams(max_tokens=of["lengths"][row])
        return sum(
            [len(chunk.logprobs) async for chunk in engine.generate(GenerateRequest(key, tuple(of["rows"][row]), params, 0))]
        )

    async def all_of(of: Job) -> list[int]:
        return await asyncio.gather(*(one(row, of) for row in range(len(of["rows"]))))

    def call(of: Job) -> float:
        got: list[int] = []
        seconds = spent(lambda: got.extend(asyncio.run(all_of(of))))
        assert got == of["lengths"]
        return seconds

    return call


@contextmanager
def plain_numerics() -> Generator[None]:
    """The same code without the rules: no padding, no tiles."""
    with ExitStack() as patches:
        for module, names in (
            (numerics, ("ROWS", "KEYS", "QUERIES")),
            (decoders, ("ROWS", "KEYS", "QUERIES")),
            (kv_cache, ("ROWS", "KEYS")),
            (heads, ("ROWS",)),
        ):
            for name in names:
                patches.enter_context(patch.object(module, name, 1))
        for name in ("TILE", "HEAD"):
            patches.enter_context(patch.object(numerics, name, 1 << 30))
        patches.enter_context(patch.object(numerics, "gate", lambda gates, up, _: F.silu(gates) * up))
        yield


def without_rules(call: Call) -> Call:
    def plain(of: Job) -> float:
        with plain_numerics():
            return call(of)

    return plain


def decode_and_products() -> tuple[Call, Call]:
    """One step of SMOL_ROWS rows up to their log-probabilities, and its products with weights alone, as they stand in the model."""
    model = init_decoder(SMOL, 0, torch.bfloat16)
    cache = KVCache(SMOL, SMOL_ROWS, SMOL_PROMPT + 16)
    tokens = torch.randint(SMOL.vocab_size, (SMOL_ROWS, SMOL_PROMPT))
    positions, temperature = torch.full((SMOL_ROWS,), SMOL_PROMPT), torch.ones(SMOL_ROWS)
    with torch.inference_mode():
        model.prefill(tokens, cache)
    matrices = [parameter.detach().to(model.dtype) for parameter in model.parameters() if parameter.ndim == 2]
    inputs = {matrix.shape[1]: torch.randn(SMOL_ROWS, matrix.shape[1]).to(model.dtype) for matrix in matrices}

    @torch.inference_mode()
    def decode(_: Job) -> float:
        return spent(lambda: heads.next_logprobs(model, model.decode(tokens[:, 0], positions, cache), temperature, cache))

    @torch.inference_mode()
    def products(_: Job) -> float:
        return spent(lambda: [F.linear(inputs[matrix.shape[1]], matrix) for matrix in matrices])

    return decode, products


def measured(case: str, against: str, ours: Call, peer: Call, jobs: Sequence[Job], limits: tuple[float, float]) -> dict[str, Any]:
    peers, mine = by_turns((peer, ours), jobs)
    ratio, (floor, stretch) = sum(peers) / sum(mine), limits
    rounds = [theirs / own for theirs, own in zip(peers, mine, strict=True)]
    row = {"case": case, "against": against, "ratio": round(ratio, 3), "floor": floor, "stretch": stretch, "pass": ratio >= floor}
    row |= {"spread": [round(min(rounds), 3), round(max(rounds), 3)], "cpu_s": round(sum(mine) / len(mine), 4)}
    print(json.dumps(row), flush=True)
    return row


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}, one thread"


def measure(arguments: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    models: dict[str, Decoder] = {}
    for name, shape in (("bench", BENCH), ("of_vllm", OF_VLLM)):
        models[name] = init_decoder(shape, 0)
        (directory / name).mkdir()
        save_decoder(models[name], directory / name)
    ragged = {slots: [job(seed, slots, 128) for seed in range(arguments.rounds)] for slots in (128, 32)}
    fixed = {num: [job(seed, num, num, 16) for seed in range(4 * arguments.rounds)] for num in (128, 16)}
    ours = {slots: tandem(models["bench"], slots) for slots in (128, 32, 16)}
    rows: list[dict[str, Any]] = []
    if arguments.transformers_python:
        with Side(arguments.transformers_python, "peers.rollout_transformers", str(directory / "bench")) as side:
            rows += [
                measured("ragged, 128 slots", "transformers", ours[128], side, ragged[128], (5, 8)),
                measured("ragged, 32 slots", "transformers", ours[32], side, ragged[32], (4.5, 7)),
                measured("fixed 128 x 16", "transformers", ours[128], side, fixed[128], (1.4, 1.6)),
                measured("fixed 16 x 16", "transformers", ours[16], side, fixed[16], (1.8, 2.2)),
            ]
    if arguments.vllm_python:
        with Side(arguments.vllm_python, "peers.rollout_vllm", str(directory / "of_vllm"), "128") as side:
            engine = tandem(models["of_vllm"], 128)
            rows.append(measured("ragged, 128 slots", "vllm", engine, side, ragged[128], (1.7, 2.5)))
    with Side(sys.executable, "floors.rollout", str(directory / "bench")) as side:
        rows += [
            measured("ragged, 128 slots", "floor", ours[128], side, ragged[128], (0.77, 0.95)),
            measured("fixed 128 x 16", "floor", ours[128], side, fixed[128], (0.77, 0.95)),
        ]
    plain = without_rules(tandem(init_decoder(BENCH, 0), 128))  # with records of its own
    rows.append(measured("ragged, 128 slots", "plain", ours[128], plain, ragged[128], (0.8, 0.9)))
    rows.append(measured("decode of 64 rows, 135M, bfloat16", "products", *decode_and_products(), fixed[16], (0.67, 0.83)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="The native engine's generation beside others; see the head of this file.")
    parser.add_argument("--transformers-python", metavar="PATH", help="a Python that has transformers")
    parser.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM for the CPU")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a ragged case; of the others four times as many")
    arguments = parser.parse_args()
    for name, value in (("transformers", arguments.transformers_python), ("vllm", arguments.vllm_python)):
        if value is None:
            print(f"rows against {name} are left out: no --{name}-python", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(arguments, Path(directory))
    print(json.dumps({"benchmark": "rollout", "machine": machine(), "rows": rows}))
    return 0 if all(row["pass"] for row in rows) else 1


if __name__ == "__main__":
    if any(os.environ.get(name) != ONE_THREAD[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})  # read when torch is loaded
    sys.exit(main())
