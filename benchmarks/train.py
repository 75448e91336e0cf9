"""What training costs: bfloat16 against float32, exact numerics against none, a real model's shape against its products alone.

    python benchmarks/train.py       # the last line is JSON; exits with 1 where a ratio is below its floor

CPU seconds on one thread; the two sides of a row take turns in one process. "Without exactness" is the same code with whole
products and without rows, keys and queries that pad: what it would be if bits were free. PyTorch's own
attention in place of the products takes as long.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from lines import Call, interleaved, publish, row
from torch import Tensor

from tandem.algos.aggregation import loss_weights
from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.models import decoder as decoders
from tandem.models import heads, kv_cache, numerics, prefixes
from tandem.models.decoder import Decoder, init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.types import GenerateRequest, Key, SamplingParams

LOSS = loss_ref(configure("grpo", {}))
SMALL = DecoderConfig(128, 160, 480, 4, 4, 2, 40, attention_bias=True, max_positions=512)
MIDDLE = DecoderConfig(4096, 512, 1536, 8, 8, 4, 64, max_positions=512)
SMOLLM2 = DecoderConfig(49_152, 576, 1536, 30, 9, 3, 64, rope_theta=100_000.0, max_positions=2048)
PROMPT = 6


def batch(rows: int, tokens: int, vocab: int, *, prompt: int = PROMPT, group: int = 8, seed: int = 0) -> DataProto:
    """Rows of `prompt` tokens that a group has in common, and so many sampled ones that each has `tokens`."""
    seeded = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocab, (rows, tokens), generator=seeded)
    drawn[:, :prompt] = drawn[::group, :prompt].repeat_interleave(group, 0)[:rows]
    mask = (torch.arange(tokens) >= prompt).repeat(rows)
    lengths = torch.full((rows,), tokens)

    def normal(size: float) -> Tensor:
        return size * torch.randn(rows * tokens, generator=seeded)

    columns = {"old_logprobs": -4 + normal(0.1), "advantages": normal(1.0), "mask": mask, "tokens": drawn.flatten()}
    columns["loss_weights"] = loss_weights(mask, lengths, aggregation="token-mean")
    keys = [Key("train", i // group, i % group) for i in range(rows)]
    return DataProto.make(keys, lengths, token=columns, row={"temperature": torch.ones(rows)})


def engine(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> TorchEngine:
    return TorchEngine(init_decoder(config, 0, dtype), TrainConfig(lr=1e-6, micro_batch_tokens=4096))


def training_step(of: TorchEngine, rows: DataProto) -> None:
    of.forward_backward(rows, LOSS)
    of.step()


# ------------------------------------------------------------------------------------------- without exactness


def _weights(q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(torch.baddbmm(bias, q, keys), -1)


def _gate(gates: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    assert activation == "silu"
    return F.silu(gates) * up


@contextmanager
def without_exactness() -> Generator[None]:
    """No product is cut into tiles; no row of a product, no query and no key is added to round a number up."""
    plain: Mapping[str, Any] = {"attention_weights": _weights, "attention_values": torch.bmm, "gate": _gate}
    ones = dict.fromkeys(("ROWS", "KEYS", "QUERIES"), 1)
    with (
        mock.patch.multiple(numerics, **plain, **ones),
        mock.patch.multiple(decoders, **ones, PASS_ROWS=1),
        mock.patch.multiple(kv_cache, ROWS=1, KEYS=1),
        mock.patch.multiple(prefixes, QUERIES=1, padded=lambda count, multiple: max(count, 1)),  # it groups rows as it does
        mock.patch.object(heads, "ROWS", 1),
    ):
        yield


def whole_step(model: Decoder, trained: TorchEngine, rows: int, length: int) -> None:
    """Generation of `rows` answers from shared prompts, and an update on rows of that size."""
    rollout = NativeEngine(model, str, NativeConfig(slots=rows, max_context=PROMPT + length), exact=True)

    async def answer(index: int) -> None:
        prompt = tuple(3 + (index // 8 + i) % 100 for i in range(PROMPT))
        request = GenerateRequest(Key("train", index // 8, index % 8), prompt, SamplingParams(max_tokens=length), 0, 0)
        async for _ in rollout.generate(request):
            pass

    async def all_answers() -> None:
        await asyncio.gather(*(answer(index) for index in range(rows)))
        await rollout.close()

    asyncio.run(all_answers())
    training_step(trained, batch(rows, PROMPT + length, model.config.vocab_size))


def _without(call: Call) -> Call:
    def run() -> None:
        with without_exactness():
            call()

    return run


# ---------------------------------------------------------------------------------------------- products alone


def products(config: DecoderConfig, tokens: int, dtype: torch.dtype) -> Call:
    """Every product with a weight in a forward and backward of so many tokens: y = x w, and the gradients of x and w."""
    D, inner = config.hidden_size, config.intermediate_size
    heads_out, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = [(D, heads_out), (D, kv), (D, kv), (heads_out, D), (D, inner), (D, inner), (inner, D)]
    shapes = {(i, o): count * config.num_layers for (i, o) in set(layer) if (count := layer.count((i, o)))}
    shapes[D, config.vocab_size] = 1
    made = {
        (i, o): (torch.randn(tokens, i).to(dtype), torch.randn(o, i).to(dtype), torch.randn(tokens, o).to(dtype)) for i, o in shapes
    }

    def run() -> None:
        for shape, count in shapes.items():
            x, w, grad = made[shape]
            for _ in range(count):
                F.linear(x, w)
                grad @ w
                grad.t() @ x

    return run


# ----------------------------------------------------------------------------------------------------- the rows


def in_bf16(repeats: int) -> dict[str, Any]:
    rows = batch(8, 64, MIDDLE.vocab_size)
    single, half = engine(MIDDLE), engine(MIDDLE, torch.bfloat16)
    found = interleaved(lambda: training_step(single, rows), lambda: training_step(half, rows), repeats)
    return _row("27M parameters, bf16 products", "the same in fp32", found, 1.4, 1.75)


def exactness(repeats: int) -> list[dict[str, Any]]:
    model = init_decoder(SMALL, 0)
    trained = TorchEngine(model, TrainConfig(lr=1e-6))
    rows = batch(64, PROMPT + 32, SMALL.vocab_size)

    def step() -> None:
        training_step(trained, rows)

    def whole() -> None:
        whole_step(model, trained, 64, 32)

    against = "the same code without exactness"
    return [
        _row("training step, exact", against, interleaved(_without(step), step, repeats), 0.94, 0.98),
        _row("whole step, exact", against, interleaved(_without(whole), whole, max(repeats // 2, 3)), 0.87, 0.94),
    ]


def real_shape(repeats: int) -> dict[str, Any]:
    rows, length = 64, 40
    trained, data = engine(SMOLLM2, torch.bfloat16), batch(rows, length, SMOLLM2.vocab_size, prompt=1, group=1)

    def ours() -> None:
        trained.forward_backward(data, LOSS)
        for parameter in trained.decoder.parameters():
            parameter.grad = None

    found = interleaved(products(SMOLLM2, rows * (length - 1), torch.bfloat16), ours, 2, warmup=0)
    return _row("SmolLM2-135M, bf16, 64 x 40 tokens", "its products alone", found, 0.6, 0.75)


def _row(case: str, against: str, found: tuple[list[float], float, float], floor: float, stretch: float) -> dict[str, Any]:
    ratios, peer_s, ours_s = found
    return row(case, against, ratios, floor, stretch, peer_s=round(peer_s, 4), tandem_s=round(ours_s, 4))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=7)
    repeats = arguments.parse_args().repeats
    torch.set_num_threads(1)
    return publish("train", [in_bf16(repeats), *exactness(repeats), real_shape(repeats)])


if __name__ == "__main__":
    sys.exit(main())
