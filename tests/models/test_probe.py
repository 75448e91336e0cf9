"""The probe says "exact" on a sound machine and sees through each rule that is broken."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.models import decoder, heads, kv_cache, numerics
from tandem.models.probe import ProbeResult, probe
from tests.models.tiny import config, threads


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_positions", [1, 24, 1024])
def test_exact_here(dtype: torch.dtype, num_threads: int, max_positions: int) -> None:
    with threads(num_threads):
        result = probe(config(max_positions=max_positions), dtype)
    assert result.exact, result
    assert (result.gap, result.note, result.law) == (0.0, "", "exact")
    assert (result.dtype, result.threads) == (dtype, num_threads)
    assert result.positions > 30


def test_it_takes_less_than_half_a_second_for_a_tiny_model() -> None:
    shape = config(hidden_size=64, intermediate_size=256, kv_heads=1)
    with threads(1):
        start = time.process_time()
        probe(shape)
        assert time.process_time() - start < 0.5


def _single_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.cat([numerics._linear(x[:1], weight, bias), numerics._linear(x[1:], weight, bias)])


def _no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decoder, kv_cache, heads, numerics):
        monkeypatch.setattr(module, "ROWS", 1)


def _no_rounding_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decoder, kv_cache, numerics):
        monkeypatch.setattr(module, "KEYS", 1)


def _too_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decoder, numerics):
        monkeypatch.setattr(module, "QUERIES", 1)


BROKEN: dict[str, Any] = {
    "rows not padded": _no_padding,
    "a row by itself": lambda patch: patch.setattr(numerics, "linear", _single_rows),
    "windows not rounded": _no_rounding_of_windows,
    "P V untiled": lambda patch: patch.setattr(numerics, "attention_values", torch.bmm),
    "too few queries": _too_few_queries,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rule_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[broken](monkeypatch)
    result = probe(config(heads=2, kv_heads=2))
    assert not result.exact
    assert "positions differ from the training forward" in result.note
    assert 0 < result.gap < 1e-3


def test_the_law_follows_from_the_gap() -> None:
    def law(gap: float) -> str:
        return ProbeResult(False, gap, 100, torch.float32, 1, "").law

    assert law(0.0) == law(9e-6) == "tolerance 1e-5"
    assert law(0.0123) == "measured gap 1.2e-02"
