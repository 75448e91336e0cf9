"""Tiny decoders and engines for the tests of this room and of the laws that live in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.models.decoder import Decoder, init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.models.heads import row_logprobs
from tandem.ports import RolloutEngine
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.types import GenerateRequest, Key, PolicyRef, SamplingParams, Stop


def decoder(
    heads: int = 4,
    kv_heads: int = 1,
    *,
    width: int = 32,
    vocabulary: int = 61,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Decoder:
    """Two layers, with weights large enough that contexts matter and distributions are far from uniform."""
    shape = DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        max_positions=1024,
        **fields,
    )
    made = init_decoder(shape, seed, dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return made


def text(tokens: Sequence[int]) -> str:
    """One character a token, from "a" on."""
    return "".join(chr(97 + token) for token in tokens)


def engine(model: Decoder, **config: Any) -> NativeEngine:
    return NativeEngine(model, text, NativeConfig(**{"slots": 8, "max_context": 128, **config}), exact=True)


def request(
    ordinal: int, tokens: Sequence[int], *, member: int = 0, sampled: int = 0, seed: int = 3, **params: Any
) -> GenerateRequest:
    return GenerateRequest(Key("t", ordinal, member), tuple(tokens), SamplingParams(**params), seed, sampled=sampled)


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    policies: list[PolicyRef]
    stop: Stop | None = None
    num_chunks: int = 0


async def answer(engine: RolloutEngine, asked: GenerateRequest, into: Answer | None = None) -> Answer:
    """All chunks of a request, gathered in `into` as they come."""
    got = into or Answer([], [], [])
    async for chunk in engine.generate(asked):
        got.tokens += chunk.tokens
        got.logprobs += chunk.logprobs
        got.policies += [chunk.policy] * len(chunk.tokens)
        got.stop = chunk.stop
        got.num_chunks += 1
    return got


async def answers(engine: RolloutEngine, asked: Iterable[GenerateRequest]) -> list[Answer]:
    """Submitted in the same tick."""
    return list(await asyncio.gather(*(answer(engine, one) for one in asked)))


def run(engine: NativeEngine, asked: Iterable[GenerateRequest]) -> list[Answer]:
    return asyncio.run(asyncio.wait_for(answers(engine, asked), 60))


def trainer_logprobs(model: Decoder, pairs: Sequence[tuple[GenerateRequest, Answer]]) -> list[Tensor]:
    """Of the sampled tokens, as one padded training batch."""
    rows = [[*asked.tokens, *got.tokens] for asked, got in pairs]
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    begin = torch.tensor([len(asked.tokens) for asked, _ in pairs])
    mask = (torch.arange(width) >= begin[:, None]) & (torch.arange(width) < lengths[:, None])
    temperature = torch.tensor([asked.params.temperature for asked, _ in pairs])
    logprobs = row_logprobs(model, tokens, lengths, mask, temperature)[0].detach()
    return [row[where] for row, where in zip(logprobs, mask, strict=True)]
