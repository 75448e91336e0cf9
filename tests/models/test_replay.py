"""Functions of tensors that are written down and run again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tandem.models import replay
from tandem.models.decoder_config import DecoderConfig
from tandem.models.kv_cache import KVCache
from tandem.models.replay import Leaves, Replay
from tests.models.tiny import config, loud, threads, tokens


class Pair(NamedTuple):
    weight: Tensor
    factor: float
    others: list[Tensor | None]


def pair(seed: int, factor: float = 2.0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    return Pair(torch.randn(3, generator=generator), factor, [None, torch.randn(3, generator=generator)])


def test_a_tree_is_filled_with_other_tensors() -> None:
    one, other = Leaves(pair(0)), Leaves(pair(1))
    filled = one.of(other.tensors)
    assert type(filled) is Pair
    assert filled.factor == 2.0
    assert filled.others[0] is None
    assert filled.others[1] is other.tree.others[1]
    assert one.shape == other.shape != Leaves(pair(0, 3.0)).shape


def test_a_function_is_called_until_it_is_called_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then neither its Python runs, nor are the tensors kept that it was written down with, nor are sizes."""
    monkeypatch.setattr(replay, "OFTEN", 3)
    calls: list[int] = []

    def function(tensors: Sequence[Tensor], tree: Pair) -> Tensor:
        calls.append(len(tensors[0]))
        tensors[1].copy_(tensors[0].sum(0))
        return tensors[0] * tree.weight * tree.factor + tensors[1]

    again, state = Replay(function), torch.zeros(3)
    for count in range(1, 9):
        given, tree = torch.randn(count, 3), pair(count)
        got = again("one way", [given, state], Leaves(tree))
        assert torch.equal(state, given.sum(0))
        assert torch.equal(got, given * tree.weight * 2.0 + state)
    assert calls == [1, 2, 3]
    again("another way", [torch.ones(1, 3), state], Leaves(pair(0)))
    again("one way", [torch.ones(1, 3), state], Leaves(pair(0, 3.0)))
    assert len(calls) == 5


def test_the_records_that_ran_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "OFTEN", 1)
    monkeypatch.setattr(replay, "MOST", 2)
    calls: list[int] = []

    def function(tensors: Sequence[Tensor], tree: Pair) -> Tensor:
        calls.append(1)
        return tensors[0] * tree.weight

    again: Replay[Pair] = Replay(function)
    for way, known in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4)):
        again(way, [torch.ones(2, 3)], Leaves(pair(0)))
        assert len(calls) == known, way


def test_what_is_written_down_keeps_no_tensors_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each record would keep a model's weights and a cache of keys."""
    monkeypatch.setattr(replay, "OFTEN", 1)
    again: Replay[Pair] = Replay(lambda tensors, tree: tensors[0] * tree.weight)
    given, tree = torch.ones(2, 3), pair(0)
    again("one way", [given], Leaves(tree))
    kept = [weakref.ref(given), weakref.ref(tree.weight)]
    del given, tree
    gc.collect()
    assert [each() for each in kept] == [None, None]


SHAPES = {
    "plain": config(),
    "rest": config(intermediate_size=84, kv_heads=4),
    "gelu": config(intermediate_size=50, activation="gelu_tanh", embedding_scale=7.0),
    "norms": config(6, 1, qk_norm=True, attention_bias=True, tie_embeddings=False, unrotated=(0,)),
    "wide heads": config(head_dim=80),
}


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_decode_step_of_any_size_is_the_same_bits(
    shape: DecoderConfig, dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many, short windows and long, one window and two, one after the other on the same records."""
    monkeypatch.setattr(replay, "OFTEN", 1)
    model, drawn = loud(shape, dtype), torch.Generator().manual_seed(0)
    cache = KVCache(shape, 100, 300)
    for filled in (cache.keys, cache.values):
        filled.normal_(generator=drawn)
    with threads(num_threads), torch.inference_mode():
        for rows in (2, 33, 17, 6):
            for longest in (10, 290):
                words = tokens(1, rows, seed=rows)[0]
                places = torch.randint(longest, (rows,), generator=drawn).sort(descending=True)[0]
                keys, values = cache.keys.clone(), cache.values.clone()
                got = model.decode(words, places, cache)
                wrote = cache.keys.clone(), cache.values.clone()
                cache.keys.copy_(keys)
                cache.values.copy_(values)
                with monkeypatch.context() as once:
                    once.setattr(model, "_step", lambda _, tensors, leaves: model._decoded(tensors, leaves.tree))
                    assert torch.equal(got, model.decode(words, places, cache)), f"{rows=} {longest=}"
                assert all(map(torch.equal, wrote, (cache.keys, cache.values)))
    assert model._step._written
