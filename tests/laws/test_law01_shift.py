"""Law 1: logprob[t] is that of token t given the tokens before t, and value[t] that of the state before it, each computed in
one function; packed, padded and brute force agree.

Brute force scores each token by itself, from a forward of nothing but its prefix, so that it cannot know what follows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.data_proto import DataProto
from tandem.models import heads, numerics
from tandem.models.decoder import Decoder
from tandem.models.values import VALUE_HEAD, ValueModel
from tandem.types import Key
from tests.laws.breaking import Breaker
from tests.models.tiny import config, loud, tokens

LENGTHS = (7, 1, 12, 2, 5)
PROMPTS = (3, 1, 4, 1, 2)


def batch() -> DataProto:
    """Ragged rows: a prompt, then sampled tokens with one observed token (masked out) in the long row."""
    stream = tokens(1, sum(LENGTHS))[0]
    mask = torch.cat([torch.arange(length) >= prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)])
    mask[7 + 1 + 8] = False
    return DataProto.make(
        [Key("t", i) for i in range(len(LENGTHS))],
        LENGTHS,
        token={"tokens": stream, "mask": mask},
        row={"temperature": torch.tensor([1.0, 1.0, 0.5, 2.0, 0.0])},
    )


def score(decoder: Decoder, rows: DataProto, *, pad: int = 0, width: int | None = None) -> Tensor:
    """Packed log-probabilities [N], by way of a padded forward."""
    padded, mask = rows.pad("tokens", value=pad, width=width), rows.pad("mask", width=width)
    logprobs, _ = heads.row_logprobs(decoder, padded, rows.lengths, mask, rows["temperature"])
    return DataProto.pack(rows.keys, rows.valid(width=width), token={"logprobs": logprobs.detach()})["logprobs"]


def brute_force(decoder: Decoder, rows: DataProto) -> Tensor:
    """Each masked token from a float64 softmax over the last hidden state of its prefix."""
    found = torch.zeros(rows.num_tokens)
    with torch.no_grad():
        for row, start in enumerate(rows.offsets[: len(rows)]):
            temperature = float(rows["temperature"][row]) or 1.0
            for place in range(start, start + int(rows.lengths[row])):
                if rows["mask"][place]:
                    last = decoder.prefill(rows["tokens"][None, start:place])[0, -1]
                    logits = decoder.output_weight.double() @ last.double() / temperature
                    found[place] = logits.log_softmax(0)[rows["tokens"][place]]
    return found


def check_brute_force() -> None:
    decoder, rows = loud(config()), batch()
    torch.testing.assert_close(score(decoder, rows), brute_force(decoder, rows), rtol=0, atol=1e-5)


def check_packed_is_padded() -> None:
    """One row at a time, all at once, at any width and with any pad token: the same bits."""
    decoder, rows = loud(config()), batch()
    alone = torch.cat([score(decoder, rows.select([i])) for i in range(len(rows))])
    for pad, width in ((0, None), (5, None), (60, 13), (0, 40)):
        assert torch.equal(score(decoder, rows, pad=pad, width=width), alone)


def check_permutation() -> None:
    decoder, rows = loud(config()), batch()
    order = [3, 0, 4, 2, 1]
    moved = rows.with_columns(token={"logprobs": score(decoder, rows)}).reorder(order)
    assert torch.equal(score(decoder, rows.reorder(order)), moved["logprobs"])


def check_only_masked_positions_count() -> None:
    """Prompt, observed and first tokens have 0, and a row's last hidden state never meets the next row's first token."""
    decoder, rows = loud(config()), batch()
    logprobs = score(decoder, rows)
    assert torch.equal(logprobs != 0, rows["mask"])
    changed = rows["tokens"].clone()
    for start in rows.offsets[: len(rows)]:
        changed[start] = (changed[start] + 1) % 61  # every first token
    others = rows.with_columns(token={"tokens": changed})
    for row, start in enumerate(rows.offsets[: len(rows)]):
        end = start + LENGTHS[row]
        one = rows["tokens"].clone()
        one[start:end] = changed[start:end]
        mixed = score(decoder, rows.with_columns(token={"tokens": one}))
        assert torch.equal(mixed[:start], logprobs[:start])
        assert torch.equal(mixed[end:], logprobs[end:])
        assert torch.equal(mixed[start:end], score(decoder, others)[start:end])


def critic() -> ValueModel:
    model, seeded = ValueModel(config()), torch.Generator().manual_seed(2)
    score = torch.randn(1, config().hidden_size, generator=seeded)
    model.load_state_dict({**loud(config()).state_dict(), VALUE_HEAD: score})
    return model


def values(model: ValueModel, rows: DataProto, *, pad: int = 0, width: int | None = None) -> Tensor:
    """Packed values [N], by way of a padded forward."""
    padded, mask = rows.pad("tokens", value=pad, width=width), rows.pad("mask", width=width)
    found = heads.row_values(model, padded, rows.lengths, mask).detach()
    return DataProto.pack(rows.keys, rows.valid(width=width), token={"values": found})["values"]


def check_values_by_brute_force() -> None:
    """A token's value is that of the state before it: the score of the last hidden state of nothing but its prefix."""
    model, rows = critic(), batch()
    found, score = values(model, rows), model.score.weight[0].detach().double()
    assert torch.equal(found != 0, rows["mask"])
    for row, start in enumerate(rows.offsets[: len(rows)]):
        for place in range(start, start + int(rows.lengths[row])):
            if rows["mask"][place]:
                last = model.prefill(rows["tokens"][None, start:place])[0, -1].detach()
                assert abs(float(found[place]) - float(score @ last.double())) < 1e-5


def check_values_packed_are_padded() -> None:
    model, rows = critic(), batch()
    alone = torch.cat([values(model, rows.select([i])) for i in range(len(rows))])
    for pad, width in ((0, None), (60, 13)):
        assert torch.equal(values(model, rows, pad=pad, width=width), alone)


CHECKS = [
    check_brute_force,
    check_packed_is_padded,
    check_permutation,
    check_only_masked_positions_count,
    check_values_by_brute_force,
    check_values_packed_are_padded,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_one_shift(check: Any) -> None:
    check()


# ---------------------------------------------------------------------------------------------------- breakers


def _late_by_one(decoder: Decoder, tokens: Tensor, lengths: Tensor, mask: Tensor, temperature: Tensor, *rest: Any) -> Any:
    """Scores token t with hidden state t, which has read it."""
    b, t = mask.nonzero().unbind(1)
    logprobs, _ = heads.token_logprobs(decoder, decoder.prefill(tokens)[b, t], tokens[b, t], temperature[b])
    return torch.zeros(tokens.shape).index_put((b, t), logprobs), None


def _result_moved_by_one(decoder: Decoder, tokens: Tensor, lengths: Tensor, mask: Tensor, *rest: Any) -> Any:
    """Right values, at the position that predicts instead of the one that is predicted."""
    logprobs, entropy = _ROW_LOGPROBS(decoder, tokens, lengths, mask, *rest)
    return logprobs.roll(-1, 1), entropy


def _across_rows(decoder: Decoder, tokens: Tensor, lengths: Tensor, mask: Tensor, temperature: Tensor, *rest: Any) -> Any:
    """Shifts the flat batch, so that a row's last state predicts the next row's first token."""
    hidden = decoder.prefill(tokens).flatten(0, 1).roll(1, 0)
    logprobs, _ = heads.token_logprobs(decoder, hidden, tokens.flatten(), temperature.repeat_interleave(tokens.shape[1]))
    first = torch.arange(tokens.shape[1])[None] == 0
    return logprobs.view(tokens.shape) * (mask | first), None


def _unmasked_prompt(decoder: Decoder, tokens: Tensor, lengths: Tensor, mask: Tensor, *rest: Any) -> Any:
    place = torch.arange(tokens.shape[1])
    return _ROW_LOGPROBS(decoder, tokens, lengths, (place > 0) & (place < lengths[:, None]), *rest)


def _value_late_by_one(model: ValueModel, tokens: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """The value of the state that has read the token."""
    at = mask.nonzero().unbind(1)
    return torch.zeros(tokens.shape).index_put(at, model.values(model.prefill(tokens)[at]))


def _padding_is_read(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention over the whole padded window."""
    return _ATTENTION(q, k, v, torch.zeros_like(bias))


_ROW_LOGPROBS, _ATTENTION = heads.row_logprobs, numerics.attention

BREAKERS = [
    Breaker(1, "late-by-one", "tandem.models.heads:row_logprobs", _late_by_one, check_brute_force),
    Breaker(1, "result-moved-by-one", "tandem.models.heads:row_logprobs", _result_moved_by_one, check_brute_force),
    Breaker(1, "shift-across-rows", "tandem.models.heads:row_logprobs", _across_rows, check_only_masked_positions_count),
    Breaker(1, "prompt-scored", "tandem.models.heads:row_logprobs", _unmasked_prompt, check_only_masked_positions_count),
    Breaker(1, "value-late-by-one", "tandem.models.heads:row_values", _value_late_by_one, check_values_by_brute_force),
    Breaker(1, "value-reads-padding", "tandem.models.numerics:attention", _padding_is_read, check_values_packed_are_padded),
    Breaker(1, "future-is-read", "tandem.models.numerics:attention", _padding_is_read, check_brute_force),
    Breaker(1, "padding-leaks", "tandem.models.numerics:attention", _padding_is_read, check_packed_is_padded),
]
