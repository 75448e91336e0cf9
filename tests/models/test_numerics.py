"""The rules of numerics.py, operation by operation, and the decoder that is built on them (law 5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.models import numerics
from tandem.models.decoder_config import DecoderConfig
from tandem.models.heads import next_logprobs, token_logprobs
from tandem.models.kv_cache import KVCache
from tandem.models.numerics import KEYS, QUERIES, ROWS, padded
from tests.models.tiny import config, loud, threads, tokens

DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(16, 32), (40, 97), (72, 32), (64, 192), (96, 8), (168, 256), (384, 128), (385, 64), (576, 192), (1536, 576), (2048, 200)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def causal(length: int, window: int) -> Tensor:
    return torch.zeros(length, window).masked_fill_(torch.arange(window) > torch.arange(length)[:, None], float("-inf"))[None]


# ------------------------------------------------------------------------------------------- a row's bits, op by op


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), SIZES)
def test_a_row_of_a_product_does_not_depend_on_its_companions(inner: int, outer: int, dtype: torch.dtype) -> None:
    """Nor on what stands above the weight or below it, nor on whether it is packed."""
    x, bias = randn(1040, inner).to(dtype), randn(outer + 40, seed=2).to(dtype)
    weight = (randn(outer + 40, inner, seed=1) * inner**-0.5).to(dtype)
    own, packed = weight[:outer].contiguous(), numerics.packed(weight)
    for b in (None, bias):
        of_own = None if b is None else b[:outer]
        with threads(1):
            want = torch.cat([numerics.linear(part, own, of_own) for part in x.split(ROWS)])
        for num_threads in (1, 2):
            with threads(num_threads):
                for rows in (2, 4, 6, 16, 48, 64, 112, 208, 400, 1040):
                    why = f"{rows} rows, {num_threads} threads"
                    assert torch.equal(numerics.linear(x[-rows:], own, of_own), want[-rows:]), why
                    assert torch.equal(numerics.linear(x[-rows:], weight, b)[:, :outer], want[-rows:]), why
                    assert torch.equal(numerics.linear(x[-rows:], packed, b)[:, :outer], want[-rows:]), why


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 128])
def test_a_query_does_not_depend_on_companions_or_window(head_dim: int) -> None:
    q, k, v = randn(6, 60, head_dim), randn(6, 704, head_dim, seed=1), randn(6, 704, head_dim, seed=2)
    for position in (0, 15, 127, 128, 300, 500, 703):
        hidden = torch.zeros(1, 1, 704).masked_fill_(torch.arange(704) > position, float("-inf"))
        shortest = padded(position + 1, KEYS)
        with threads(1):
            want = numerics.attention(q[:1, :1], k[:1, :shortest], v[:1, :shortest], hidden[:, :, :shortest])[0, 0]
        for num_threads in (1, 2):
            with threads(num_threads):
                for problems, queries in ((1, 1), (1, 3), (2, 4), (3, 5), (6, 9), (1, 60), (6, 60)):
                    for window in {shortest, padded(position + 60, KEYS), 704}:
                        if window <= 704:
                            asked = q[:problems, :queries].clone()
                            asked[-1, -1] = q[0, 0]
                            keys, values = k[:problems, :window].clone(), v[:problems, :window].clone()
                            keys[-1], values[-1] = k[0, :window], v[0, :window]
                            got = numerics.attention(asked, keys, values, hidden[:, :, :window])[-1, -1]
                            assert torch.equal(got, want), f"{position=} {problems=} {queries=} {window=} {num_threads=}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [33, 50, 84, 96, 250])
def test_elements_do_not_depend_on_how_threads_share_them(width: int, num_threads: int, dtype: torch.dtype) -> None:
    """At 96 there are three grains, in which four threads would not cut at whole vectors; other widths end within a vector."""
    rows = 1008
    x, y, weight = randn(rows, width).to(dtype), randn(rows, width, seed=1).to(dtype), randn(width, seed=2)
    heads, cos, sin = randn(rows, 6, 16, seed=5), randn(rows, 1, 16, seed=3), randn(rows, 1, 16, seed=4)
    functions: dict[str, Callable[[slice], Tensor]] = {
        "gate": lambda part: numerics.gate(x[part], y[part]),
        "gate_of_halves": lambda part: numerics.gate(*torch.cat([x[part], y[part]], 1).split(width, 1)),
        "rms_norm": lambda part: numerics.rms_norm(x[part].float(), weight, 1e-6),
        "rotate": lambda part: numerics.rotate(heads[part], cos[part], sin[part]),
        "log_softmax": lambda part: numerics.log_softmax(x[part].float()),
    }
    for name, function in functions.items():
        with threads(1):
            want = torch.cat([function(slice(start, start + 16)) for start in range(0, rows, 16)])
        with threads(num_threads):
            assert torch.equal(function(slice(0, rows)), want), name


# --------------------------------------------------------------------------------------- values and gradients


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(("head_dim", "length"), [(16, 20), (32, 150), (128, 280)])
def test_attention_and_its_gradients_are_the_plain_ones(head_dim: int, length: int) -> None:
    window = padded(length, KEYS)
    inputs = [randn(3, size, head_dim, seed=seed).requires_grad_() for seed, size in enumerate((length, window, window))]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out = numerics.attention(*inputs, causal(length, window))  # type: ignore[arg-type]
    q, k, v = exact
    want = torch.softmax(q @ k.transpose(1, 2) * head_dim**-0.5 + causal(length, window).double(), -1) @ v
    grad = randn(*out.shape, seed=4)
    assert relative(out, want) < 1e-6
    for got, plain in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, exact, grad.double()), strict=True):
        assert relative(got, plain) < 1e-6


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_and_its_gradients_are_the_plain_ones(biased: bool) -> None:
    inputs = [randn(32, 1000), randn(24, 1000, seed=1), *([randn(24, seed=2)] if biased else [])]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, want = numerics.linear(*inputs), F.linear(*exact)
    grad = randn(32, 24, seed=3)
    assert relative(out, want) < 1e-6
    for got, plain in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, exact, grad.double()), strict=True):
        assert relative(got, plain) < 1e-6


@pytest.mark.parametrize("biased", [False, True])
def test_bfloat16_is_multiplied_in_float32_where_the_processor_cannot(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each result is rounded once, packed or not, so that it is that of float32 but for this rounding."""
    monkeypatch.setattr(numerics, "_multiplied", lambda _: torch.float32)
    wide = [randn(32, 300), randn(24, 300, seed=1), *([randn(24, seed=2)] if biased else [])]
    x, weight, *bias = (tensor.to(torch.bfloat16) for tensor in wide)
    want = numerics.linear(*(tensor.to(torch.bfloat16).float() for tensor in wide)).to(torch.bfloat16)
    for of in (weight, numerics.packed(weight)):
        got = numerics.linear(x, of, *bias)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, want)
    assert torch.equal(numerics.product(x, weight.t()), numerics.product(x.float(), weight.t().float()).to(torch.bfloat16))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_either_library_multiplies_backwards(wide: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_sums_in_order", lambda _: fast)
    a, b = randn(40, 48).to(wide), randn(48, 24, seed=1).to(wide)
    for left in (a, a.t().contiguous().t()):
        got = numerics.product(left, b)
        assert got.dtype == wide
        torch.testing.assert_close(
            got.double(), a.double() @ b.double(), rtol=torch.finfo(wide).eps, atol=48 * torch.finfo(wide).eps
        )


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = randn(16, 500).requires_grad_(), randn(8, 500, seed=1)
    numerics.linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_products_refuse_what_would_break_the_rules() -> None:
    with pytest.raises(AssertionError, match="17 rows"):
        numerics.linear(randn(17, 8), randn(8, 8))
    with pytest.raises(AssertionError, match="20 keys"):
        numerics.attention(randn(1, 4, 8), randn(1, 20, 8), randn(1, 20, 8), torch.zeros(1, 1, 20))


# ------------------------------------------------------------------------------ law 5: decoding is the training forward


def differing(shape: DecoderConfig, dtype: torch.dtype, lengths: tuple[int, ...], prompts: tuple[int, ...]) -> int:
    """Positions whose hidden state or log-probabilities in generation differ from a training forward of all rows.

    Rows join in turn through three slots, the first `prompts[i]` tokens of row i by prefill and the rest one by one; when
    a row ends, the last one moves into its slot.
    """
    model, batch = loud(shape, dtype), tokens(len(lengths), max(lengths))
    temperatures = torch.tensor([0.5, 1.0, 2.0, 0.0, 1.3])[: len(lengths)]
    hidden = model.prefill(batch)
    targets = batch.roll(-1, 1)
    trained, _ = token_logprobs(
        model, hidden.flatten(0, 1), targets.flatten(), temperatures.repeat_interleave(batch.shape[1]), chunk_rows=48
    )
    trained = trained.view(batch.shape)
    waiting, live, count = list(range(len(lengths))), [], 0
    cache = KVCache(shape, 3, max(lengths), dtype)
    at = list(prompts)
    with torch.inference_mode():
        while waiting or live:
            while waiting and len(live) < 3:
                row = waiting.pop(0)
                model.prefill(batch[row : row + 1, : at[row]], cache, torch.tensor([len(live)]))
                live.append(row)
            rows, places = torch.tensor(live), torch.tensor([at[row] for row in live])
            got = model.decode(batch[rows, places], places, cache)
            logprobs = next_logprobs(model, got, temperatures[rows]).gather(1, targets[rows, places, None])[:, 0]
            count += int(((got != hidden[rows, places]).any(1) | (logprobs != trained[rows, places])).sum())
            for row in live:
                at[row] += 1
            for slot in reversed(range(len(live))):
                if at[live[slot]] == lengths[live[slot]]:
                    last = live.pop()
                    if slot < len(live):
                        cache.copy(torch.tensor([len(live)]), torch.tensor([slot]), at[last])
                        live[slot] = last
    return count


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (9, 3)])
def test_decoding_is_the_training_forward(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, num_threads: int) -> None:
    with threads(num_threads):
        assert differing(config(*heads, head_dim), dtype, (150, 9, 40, 23, 2), (5, 1, 39, 20, 1)) == 0


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 1), (9, 3)])
def test_decoding_700_tokens_is_the_training_forward(heads: tuple[int, int], dtype: torch.dtype, num_threads: int) -> None:
    with threads(num_threads):
        assert differing(config(*heads), dtype, (700, 450, 30), (100, 230, 3)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fields",
    [
        {"attention_bias": True, "output_bias": True, "mlp_bias": True},
        {"qk_norm": True, "head_dim": 128},
        {"hidden_size": 448, "intermediate_size": 800, "tie_embeddings": False, "vocab_size": 211},
        {"heads": 3, "kv_heads": 3, "head_dim": 8, "hidden_size": 24, "intermediate_size": 40, "num_layers": 5},
        {"hidden_size": 270, "intermediate_size": 255, "head_dim": 20},
    ],
    ids=["biases", "qk-norm", "wide", "narrow", "odd"],
)
def test_every_shape_is_exact(fields: dict[str, int], dtype: torch.dtype) -> None:
    assert differing(config(**fields), dtype, (140, 33, 60), (1, 30, 2)) == 0


def test_queries_are_padded_for_small_groups_only() -> None:
    seen: list[int] = []
    weights = numerics.attention_weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "attention_weights", lambda q, k, bias: seen.append(q.shape[1]) or weights(q, k, bias))
        for group in (1, 3, 4, 6):
            q, k = randn(2, group, 8), randn(2, 16, 8)
            assert numerics.attention(q, k, k, torch.zeros(1, 1, 16)).shape == (2, group, 8)
    assert seen == [QUERIES, QUERIES, 4, 6]


@pytest.mark.parametrize("shape", [(7, 24), (7, 3, 8)])
def test_the_gradient_of_rms_norm_is_that_of_its_formula(shape: tuple[int, ...]) -> None:
    """Also for a norm of each head, whose weight [heads, d] is broadcast over rows."""
    generator = torch.Generator().manual_seed(5)
    x, weight, along = (torch.randn(size, generator=generator) for size in (shape, shape[1:], shape))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    got = torch.autograd.grad((numerics.rms_norm(x, weight, 1e-6) * along).sum(), (x, weight))
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    plain = wide[0] / (wide[0].square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide[1]
    for found, want in zip(got, torch.autograd.grad((plain * along).sum(), wide), strict=True):
        assert (found - want).norm() / want.norm() < 1e-6
