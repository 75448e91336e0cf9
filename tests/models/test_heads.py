"""The chunked output layer against whole softmaxes: values, gradients, entropy, bits; and what row_logprobs refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from tandem.errors import ColumnError
from tandem.models import heads
from tandem.models.decoder import Decoder
from tandem.models.heads import next_logprobs, row_logprobs, row_sum_pi_squared, row_top, row_values, token_logprobs, top_logprobs
from tandem.models.language_model import LanguageModel
from tandem.models.values import VALUE_HEAD, ValueModel
from tests.models.tiny import config, loud, tokens

M = 70


def inputs(decoder: Decoder) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, targets and temperatures of M rows."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(M, decoder.config.hidden_size, generator=generator).to(decoder.dtype).requires_grad_()
    return hidden, tokens(1, M)[0], torch.tensor([0.5, 1.0, 2.0, 0.0, 1.0])[torch.arange(M) % 5]


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from one whole float64 softmax."""
    logits = hidden @ weight.T / torch.where(temperature == 0, 1.0, temperature)[:, None]
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_rows", [None, 1, 32])
def test_values_and_gradients_are_those_of_a_whole_softmax(chunk_rows: int | None, tied: bool) -> None:
    decoder = loud(config(tie_embeddings=tied))
    hidden, targets, temperature = inputs(decoder)
    logprobs, entropy = token_logprobs(decoder, hidden, targets, temperature, chunk_rows=chunk_rows, with_entropy=True)
    assert entropy is not None
    hidden64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (hidden, decoder.output_weight))
    want = reference(hidden64, weight64, targets, temperature)
    torch.testing.assert_close((logprobs.double(), entropy.double()), want, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, M)
    (logprobs @ weights + entropy @ weights.flip(0)).backward()
    (want[0] @ weights.double() + want[1] @ weights.flip(0).double()).backward()
    for got, plain in ((hidden.grad, hidden64.grad), (decoder.output_weight.grad, weight64.grad)):
        assert got is not None
        assert plain is not None
        assert (got - plain).norm() / plain.norm() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_next_logprobs_in_any_chunk(dtype: torch.dtype) -> None:
    decoder = loud(config(), dtype)
    hidden, targets, temperature = inputs(decoder)
    want = next_logprobs(decoder, hidden, temperature).gather(1, targets[:, None])[:, 0]
    for chunk_rows in (None, 16, 48):
        for with_entropy in (False, True):
            got, _ = token_logprobs(decoder, hidden, targets, temperature, chunk_rows=chunk_rows, with_entropy=with_entropy)
            assert torch.equal(got, want)
    alone = torch.cat([next_logprobs(decoder, hidden[i : i + 1], temperature[i : i + 1]) for i in range(M)])
    assert torch.equal(alone, next_logprobs(decoder, hidden, temperature))
    part, _ = token_logprobs(decoder, hidden[5:22], targets[5:22], temperature[5:22])
    assert torch.equal(part, want[5:22])


def test_logits_never_exist_for_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = loud(config())
    hidden, targets, temperature = inputs(decoder)
    rows: list[int] = []
    whole = heads.numerics.linear
    monkeypatch.setattr(heads.numerics, "linear", lambda h, w: rows.append(len(h)) or whole(h, w))
    monkeypatch.setattr(heads, "KEPT_BYTES", 39 * decoder.config.vocab_size * 4)
    token_logprobs(decoder, hidden, targets, temperature)[0].sum().backward()
    assert rows == [40, 30, 40, 30]  # forward and backward; 39 rows of logits round up to 40


def test_parts_of_a_cache_change_no_bits_and_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = loud(config())
    hidden, targets, temperature = inputs(decoder)

    def found() -> list[Tensor | None]:
        hidden.grad = decoder.output_weight.grad = None
        logprobs, entropy = token_logprobs(decoder, hidden, targets, temperature, with_entropy=True)
        assert entropy is not None
        (logprobs.square().sum() + entropy.sum()).backward()
        return [logprobs, entropy, hidden.grad, decoder.output_weight.grad]

    whole = found()
    monkeypatch.setattr(heads, "CACHED_LOGITS", 16 * decoder.config.vocab_size)
    for got, want in zip(found(), whole, strict=True):
        assert torch.equal(cast("Tensor", got), cast("Tensor", want))


def test_the_gradient_of_a_likely_token_is_not_that_of_a_rounded_probability() -> None:
    """In bfloat16 the number before 1 is 1 - 2^-8, and a probability of 0.999 would be 1."""
    weight = torch.tensor([[7.0], [0.0]], dtype=torch.bfloat16).repeat(1, 16) / 16
    model = SimpleNamespace(output_weight=weight)
    hidden = torch.ones(1, 16, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(cast("LanguageModel", model), hidden, torch.tensor([0]), torch.ones(1))
    logprobs.sum().backward()
    assert hidden.grad is not None
    p = 1 / (1 + math.exp(-7))
    assert hidden.grad[0, 0].item() == pytest.approx(7 / 16 * (1 - p), rel=0.02)


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    decoder = loud(config())
    decoder.requires_grad_(False)
    hidden, targets, temperature = inputs(decoder)
    token_logprobs(decoder, hidden, targets, temperature)[0].sum().backward()
    assert hidden.grad is not None
    assert decoder.output_weight.grad is None


def test_bfloat16_gradients_reach_the_float32_masters() -> None:
    decoder = loud(config(), torch.bfloat16)
    lengths, mask = torch.tensor([9, 9]), torch.ones(2, 9, dtype=torch.bool)
    mask[:, 0] = False
    row_logprobs(decoder, tokens(2, 9), lengths, mask, torch.ones(2))[0].sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.abs().max() > 0, name


def test_no_masked_position_gives_zeros_that_can_be_differentiated() -> None:
    decoder = loud(config())
    for width in (1, 6):
        logprobs, entropy = row_logprobs(
            decoder, tokens(2, width), torch.tensor([width, 1]), torch.zeros(2, width, dtype=torch.bool), torch.ones(2), True
        )
        assert entropy is not None
        assert not logprobs.any()
        (logprobs.sum() + entropy.sum()).backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in decoder.parameters())


@pytest.mark.parametrize(("row", "position"), [(0, 0), (1, 4)])
def test_a_mask_where_nothing_is_predicted_is_refused(row: int, position: int) -> None:
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[row, position] = True
    with pytest.raises(ColumnError, match=f"row {row} has its mask true at position {position}"):
        row_logprobs(loud(config()), tokens(2, 6), torch.tensor([6, 4]), mask, torch.ones(2))


@pytest.mark.parametrize("chunk_rows", [None, 16])
def test_several_targets_at_one_place_have_the_bits_and_gradients_of_a_whole_softmax(chunk_rows: int | None) -> None:
    decoder = loud(config())
    hidden, targets, temperature = inputs(decoder)
    several = torch.stack([targets, targets.flip(0), targets.flip(0)], 1)  # the last two are the same token, and add up
    got, entropy = token_logprobs(decoder, hidden, several, temperature, chunk_rows=chunk_rows, with_entropy=True)
    assert got.shape == (M, 3)
    assert entropy is not None
    assert torch.equal(got[:, 0], token_logprobs(decoder, hidden, targets, temperature)[0])
    assert torch.equal(got[:, 2], token_logprobs(decoder, hidden, targets.flip(0), temperature)[0])
    hidden64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (hidden, decoder.output_weight))
    want = torch.stack([reference(hidden64, weight64, several[:, k], temperature)[0] for k in range(3)], 1)
    weights = torch.linspace(-1, 1, 3 * M).reshape(M, 3)
    ((got * weights).sum() + entropy.sum()).backward()
    ((want * weights.double()).sum() + reference(hidden64, weight64, targets, temperature)[1].sum()).backward()
    for grad, plain in ((hidden.grad, hidden64.grad), (decoder.output_weight.grad, weight64.grad)):
        assert grad is not None
        assert plain is not None
        assert (grad - plain).norm() / plain.norm() < 1e-6


@pytest.mark.parametrize("chunk_rows", [None, 16])
def test_the_top_of_a_distribution_is_sorted_and_has_its_bits(chunk_rows: int | None) -> None:
    decoder = loud(config())
    hidden, _, temperature = inputs(decoder)
    ids, logprobs = top_logprobs(decoder, hidden, temperature, 4, chunk_rows=chunk_rows)
    assert torch.equal(logprobs, next_logprobs(decoder, hidden, temperature).topk(4).values)
    assert torch.equal(token_logprobs(decoder, hidden, ids, temperature)[0], logprobs)
    assert not logprobs.requires_grad
    for top in (0, decoder.config.vocab_size + 1):
        with pytest.raises(ColumnError, match=f"top={top} likeliest"):
            top_logprobs(decoder, hidden, temperature, top)


def test_rows_look_up_what_they_are_told_to() -> None:
    decoder, rows = loud(config()), tokens(2, 6)
    lengths, mask = (
        torch.tensor([6, 4]),
        torch.tensor([[False, True, False, True, True, True], [False, False, True, True, False, False]]),
    )
    ids, logprobs = row_top(decoder, rows, lengths, mask, torch.ones(2), 3)
    assert ids.shape == logprobs.shape == (2, 6, 3)
    assert bool((logprobs[~mask] == 0).all())
    assert bool((logprobs[mask] < 0).all())
    found, _ = row_logprobs(decoder, rows, lengths, mask, torch.ones(2), targets=ids)
    assert torch.equal(found, logprobs)
    own, _ = row_logprobs(decoder, rows, lengths, mask, torch.ones(2), targets=rows[:, :, None])
    assert torch.equal(own[:, :, 0], row_logprobs(decoder, rows, lengths, mask, torch.ones(2))[0])


def test_a_value_is_that_of_the_state_before_its_token() -> None:
    model = ValueModel(config())
    model.load_state_dict({**loud(config()).state_dict(), VALUE_HEAD: torch.randn(1, config().hidden_size)})
    rows, lengths, mask = tokens(2, 6), torch.tensor([6, 4]), torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 2:], mask[1, 3] = True, True
    values = row_values(model, rows, lengths, mask)
    assert torch.equal(values != 0, mask)
    for b, t in mask.nonzero().tolist():
        (want,) = model.values(model.prefill(rows[b : b + 1, :t])[0, -1:])
        torch.testing.assert_close(values[b, t], want, rtol=0, atol=1e-5)


def test_the_sum_of_squared_probabilities() -> None:
    decoder = loud(config())
    rows, lengths, mask = tokens(2, 6), torch.tensor([6, 4]), torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 2:], mask[1, 3] = True, True
    temperature = torch.tensor([0.5, 0.0])
    found = row_sum_pi_squared(decoder, rows, lengths, mask, temperature)
    assert torch.equal(found != 0, mask)
    for b, t in mask.nonzero().tolist():
        logits = decoder.prefill(rows[b : b + 1, :t])[0, -1].double() @ decoder.output_weight.double().T
        chances = (logits.detach() / (float(temperature[b]) or 1.0)).softmax(0)
        assert float(found[b, t]) == pytest.approx(float((chances**2).sum()), rel=1e-4)
