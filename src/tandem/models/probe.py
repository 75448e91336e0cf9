"""The start-up probe: does this machine give a token the same bits in training and in generation?

The rules in numerics.py were found by experiment, and kernels differ between processors, library versions and thread
counts. So a run asks before it promises: the probe scores rows as training does, then again in other company and token
by token as generation does, and says which law the run is under. It is a sample of shapes, not a proof. It uses a model
of the run's shapes, cut to two layers and WORDS words, with weights of its own that are large enough for every part to
show in the last bit: a fresh or a nearly dead model would hide differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.models.decoder import Decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.models.heads import next_logprobs, token_logprobs
from tandem.models.kv_cache import KVCache
from tandem.models.numerics import GRAIN, KEYS, TILE

TOLERANCE = 1e-5
LENGTH = 3 * TILE + 2 * KEYS + 5  # odd, and past the 384 keys up to which kernels left alone were seen to agree
WORDS = 8192
COMPANY = (1, 3, 19)  # rows of a decode step


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """exact: not one position differs in any bit. gap: the largest difference of a log-probability.

    positions: how many were compared; dtype and threads: what it was found under; note: where the first difference was.
    """

    exact: bool
    gap: float
    positions: int
    dtype: torch.dtype
    threads: int
    note: str

    @property
    def law(self) -> str:
        """What this run may promise of rollout log-probabilities against the trainer's."""
        if self.exact:
            return "exact"
        return f"tolerance {TOLERANCE:.0e}".replace("e-0", "e-") if self.gap <= TOLERANCE else f"measured gap {self.gap:.1e}"


def probe(config: DecoderConfig, dtype: torch.dtype = torch.float32, adapt: Callable[[Decoder], None] | None = None) -> ProbeResult:
    """Compares a training forward with the same tokens in other company, under the current thread count.

    config: the run's model; dtype: its compute dtype; adapt: puts the run's adapter into a model, if it has one.
    """
    length = min(config.max_positions, LENGTH)
    rows = max(3, 2 * GRAIN // (length * config.hidden_size) | 1)  # enough for torch to share a tensor between threads
    smaller = {"num_layers": 2, "vocab_size": WORDS, "max_positions": length}
    shape = replace(config, **{name: min(getattr(config, name), size) for name, size in smaller.items()})
    decoder = _loud_decoder(shape, dtype, adapt)
    tokens = torch.randint(shape.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    targets, temperatures = tokens.roll(-1, 1), torch.tensor([0.5, 1.0, 2.0])[torch.arange(rows) % 3]
    with torch.enable_grad():
        hidden = decoder.prefill(tokens)
        trained, _ = token_logprobs(decoder, hidden.flatten(0, 1), targets.flatten(), temperatures.repeat_interleave(length))
    hidden, trained = hidden.detach(), trained.detach().view(rows, length)
    positions, differing, gap, note = 0, 0, 0.0, ""
    with torch.no_grad():
        for context, row, place, again in _contexts(decoder, tokens):
            found = next_logprobs(decoder, again, temperatures[row]).gather(1, targets[row, place, None])[:, 0]
            wrong = (again != hidden[row, place]).any(1) | (found != trained[row, place])
            positions, differing = positions + len(row), differing + int(wrong.sum())
            gap = max(gap, float((found - trained[row, place]).abs().max()))
            if not note and wrong.any():
                note = f"{context}: {int(wrong.sum())} of {len(row)} positions differ from the training forward"
    return ProbeResult(differing == 0, gap, positions, dtype, torch.get_num_threads(), note)


def _loud_decoder(config: DecoderConfig, dtype: torch.dtype, adapt: Callable[[Decoder], None] | None) -> Decoder:
    decoder = Decoder(config, dtype)
    if adapt is not None:
        adapt(decoder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.1 * noise)
        decoder.model.embed_tokens.weight.normal_(generator=generator)
    return decoder


def _contexts(decoder: Decoder, tokens: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(where, rows [n], positions [n], hidden states [n, D] found there), in each company that the probe tries."""
    rows, length = tokens.shape

    def forward(name: str, part: Tensor, row: Tensor) -> tuple[str, Tensor, Tensor, Tensor]:
        B, T = part.shape
        return name, row.repeat_interleave(T), torch.arange(T).repeat(B), decoder.prefill(part).flatten(0, 1)

    yield forward("a row alone", tokens[:1], torch.arange(1))
    short = max(length // 2, 1)
    yield forward(f"rows in reverse order, cut to {short} tokens", tokens[:, :short].flip(0), torch.arange(rows).flip(0))

    edges = (0, KEYS, TILE, 2 * TILE, 3 * TILE, length // 2, length - 1)
    places = torch.tensor(sorted({place for edge in edges for place in (edge - 1, edge, edge + 1) if 0 <= place < length}))
    slots = torch.arange(max(COMPANY))
    cache = KVCache(decoder.config, len(slots), length)
    decoder.prefill(tokens[:3], cache)
    cache.copy(slots % 3, slots, length)
    for company in COMPANY:
        row = slots[:company] % 3
        for step in range(len(places)):
            place = places[(slots[:company] + step) % len(places)]
            yield f"a decode step of {company} rows", row, place, decoder.decode(tokens[row, place], place, cache)
