"""Law 5: with the native engine, rollout logprobs equal the trainer's bit for bit, so that on policy the ratio is exactly 1.

Rows join and leave in the middle of a batch, share prompts, have their own temperatures; the trainer reads them in one
batch, in two, and one by one. Equal means torch.equal, with no tolerance, wherever the start-up probe says "exact".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.algos.extra_terms import kl_estimate
from tandem.algos.functions import loss_function
from tandem.algos.kl import KLEstimator
from tandem.algos.terms import LossInputs
from tandem.checkpoint.gathered import GatheredWeights
from tandem.models import heads as output_heads
from tandem.models import numerics, prefixes, replay
from tandem.models.adapters import LoraConfig
from tandem.models.decoder import Decoder
from tandem.models.decoder_config import StretchedRope
from tandem.models.kv_cache import KVCache
from tandem.models.lora import LoraLinear, add_lora
from tandem.models.probe import probe
from tandem.ports import WeightSource
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.types import GenerateRequest, PolicyRef
from tandem.weights import whole_shards
from tests.laws.breaking import Breaker
from tests.rollout.tiny import Answer, answer, decoder, engine, request, run, trainer_logprobs

HEADS = [(4, 4), (4, 1), (6, 2), (9, 3)]
LORA = LoraConfig(rank=5, alpha=10.0)
TEMPERATURES = (0.5, 1.0, 2.0)
Pairs = Sequence[tuple[GenerateRequest, Answer]]


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ragged(num: int, longest_prompt: int, longest_answer: int, seed: int) -> list[GenerateRequest]:
    """Pairs with one prompt; prompts and answers of 1 token and more; temperatures in turn."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    prompts = [[draw(0, 60) for _ in range(draw(1, longest_prompt))] for _ in range(-(-num // 2))]
    return [
        request(
            i // 2,
            prompts[i // 2],
            member=i % 2,
            temperature=TEMPERATURES[i % 3],
            max_tokens=draw(1, longest_answer),
            stop_ids=(7,),
        )
        for i in range(num)
    ]


def assert_equal(model: Decoder, pairs: Pairs) -> None:
    """In one training batch, in two that mix lengths otherwise, and one by one."""
    for parts in ([pairs], [pairs[::2], pairs[1::2]], [[pair] for pair in pairs]):
        for part in parts:
            for (asked, got), want in zip(part, trainer_logprobs(model, part), strict=True):
                assert torch.equal(torch.tensor(got.logprobs), want), f"{asked.key} at temperature {asked.params.temperature}"


def check(heads: tuple[int, int] = (4, 1), num_threads: int = 1, dtype: torch.dtype = torch.float32) -> None:
    """Fourteen ragged requests through five slots: refill and compaction at almost every step."""
    with threads(num_threads):
        model = decoder(*heads, width=8 * heads[0], dtype=dtype)
        asked = ragged(14, 12, 40, seed=heads[0])
        rollout = engine(model, slots=5)
        pairs = list(zip(asked, run(rollout, asked), strict=True))
        assert 1 < rollout.metrics()["live_rows"].value < 5
        assert_equal(model, pairs)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "tie_embeddings": False},
    "llama3": {"stretched": StretchedRope(8.0, 1.0, 4.0, 16), "mlp_bias": True, "attention_bias": True, "output_bias": True},
    "gemma": {"norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 32**0.5},
    "smollm3": {"unrotated": (1,)},
}


def check_family(name: str, num_threads: int = 1, dtype: torch.dtype = torch.float32) -> None:
    """What a family adds to the decoder, in the same company."""
    with threads(num_threads):
        model = decoder(4, 2, dtype=dtype, **FAMILIES[name])  # wide enough for joined products
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # biases and norms as they are at first would hide
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        asked = ragged(14, 12, 40, seed=5)
        assert_equal(model, list(zip(asked, run(engine(model, slots=5), asked), strict=True)))


def check_adapter(num_threads: int = 1, dtype: torch.dtype = torch.float32) -> None:
    """The same, of a model with an adapter that has learned something."""
    with threads(num_threads):
        model = decoder(4, 1, dtype=dtype)
        asked = ragged(14, 12, 40, seed=4)
        without = run(engine(model, slots=5), asked)
        add_lora(model, LORA, 0)
        at_first = run(engine(model, slots=5), asked)
        assert [(one.tokens, one.logprobs) for one in at_first] == [(one.tokens, one.logprobs) for one in without]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(0))
        adapted = run(engine(model, slots=5), asked)
        assert [one.tokens for one in adapted] != [one.tokens for one in without]
        assert_equal(model, list(zip(asked, adapted, strict=True)))


def check_long() -> None:
    """A row of 700 tokens beside short ones that come and go: windows of several tiles."""
    model = decoder(4, 1)
    prompt = [(7 * i) % 61 for i in range(560)]
    asked = [request(90, prompt, max_tokens=140), request(91, prompt[:300], max_tokens=20), *ragged(6, 150, 20, seed=1)]
    pairs = list(zip(asked, run(engine(model, slots=3, max_context=700), asked), strict=True))
    assert len(pairs[0][0].tokens) + len(pairs[0][1].tokens) == 700
    assert_equal(model, pairs)


def check_again(scene: Callable[[], None]) -> None:
    """Where every step, from the first of its kind on, is run as it was written down."""
    with patch.object(replay, "OFTEN", 1):
        scene()


def check_new_weights() -> None:
    """Tokens sampled after a publish in the middle of their row are on policy for the new weights: nothing stale is read."""
    model, new = decoder(), decoder(seed=1)

    async def scene(got: Answer) -> None:
        rollout = engine(model)
        task = asyncio.create_task(answer(rollout, asked, got))
        for _ in range(15):
            await asyncio.sleep(0)
        await rollout.load_weights(GatheredWeights(tuple(whole_shards(new))), PolicyRef(version=1))
        await task

    asked, got = request(0, (1, 2, 3, 4), max_tokens=40), Answer([], [], [])
    asyncio.run(scene(got))
    old = got.policies.count(PolicyRef())
    assert 0 < old < 40
    (before,), (after,) = trainer_logprobs(decoder(), [(asked, got)]), trainer_logprobs(new, [(asked, got)])
    assert torch.equal(torch.tensor(got.logprobs), torch.cat([before[:old], after[old:]]))


def check_temperature() -> None:
    """Both sides mean the softmax of logits / temperature: against plain torch, without any of the shared code's heads."""
    model = decoder()
    asked = [request(i, (1, 2, 3), temperature=temperature, max_tokens=20) for i, temperature in enumerate(TEMPERATURES)]
    for one, got in zip(asked, run(engine(model), asked), strict=True):
        hidden = model.prefill(torch.tensor([[*one.tokens, *got.tokens]]))[0, len(one.tokens) - 1 : -1]
        logits = hidden.detach() @ model.output_weight.detach().T
        want = (logits / one.params.temperature).log_softmax(-1).gather(1, torch.tensor(got.tokens)[:, None])[:, 0]
        assert (torch.tensor(got.logprobs) - want).abs().max() < 1e-5


def check_first_step() -> None:
    """The KL from the reference is exactly 0 and every ratio exactly 1 where the policy has not moved yet: what GRPO measures.

    The reference is another object with the same weights, and reads the rows in other batches than the trainer.
    """
    model, reference = decoder(4, 1), decoder(4, 1)
    pairs = list(zip(asked := ragged(14, 12, 40, seed=4), run(engine(model, slots=5), asked), strict=True))
    sampled = [torch.tensor(got.logprobs) for _, got in pairs]
    halves = [*trainer_logprobs(reference, pairs[::2]), *trainer_logprobs(reference, pairs[1::2])]
    from_reference = [halves[i // 2 + (i % 2) * -(-len(pairs) // 2)] for i in range(len(pairs))]
    lengths = torch.tensor([len(each) for each in sampled])
    columns = {"old_logprobs": torch.cat(sampled), "ref_logprobs": torch.cat(from_reference)}
    inputs = LossInputs(
        logprobs=torch.cat(trainer_logprobs(model, pairs)),
        mask=torch.ones(int(lengths.sum()), dtype=torch.bool),
        lengths=lengths,
        columns={**columns, "advantages": torch.ones(int(lengths.sum()))},
    )
    for estimator in get_args(KLEstimator):
        found = kl_estimate(inputs, "kl", "ref_logprobs", 1.0, estimator, "direct")
        assert not bool(found.terms["kl"].any()), estimator
    metrics = loss_function("ppo_clip+kl")(inputs, kl_coef=0.1).metrics.values_by_name()
    assert {name: metrics[name] for name in ("ratio", "ratio_max", "kl_old_new", "kl_ref", "clip_fraction")} == {
        "ratio": 1.0,
        "ratio_max": 1.0,
        "kl_old_new": 0.0,
        "kl_ref": 0.0,
        "clip_fraction": 0.0,
    }


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("heads", HEADS)
def test_rollout_logprobs_are_the_trainers(heads: tuple[int, int], num_threads: int) -> None:
    check(heads, num_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rollout_logprobs_are_the_trainers_with_an_adapter(num_threads: int, dtype: torch.dtype) -> None:
    with threads(num_threads):
        probed = probe(decoder(4, 1).config, dtype, lambda model: add_lora(model, LORA, 0))
    assert probed.exact or (dtype == torch.bfloat16 and probed.gap > 0)
    if probed.exact:
        check_adapter(num_threads, dtype)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("heads", HEADS)
def test_bfloat16_is_exact_where_the_probe_says_so(heads: tuple[int, int], num_threads: int) -> None:
    """Elsewhere the probe states the gap, and an engine that is told so does not call itself exact."""
    with threads(num_threads):
        model = decoder(*heads, width=8 * heads[0], dtype=torch.bfloat16)
        probed = probe(model.config, model.dtype)
        assert probed.dtype == torch.bfloat16
        if probed.exact:
            check(heads, num_threads, torch.bfloat16)
        else:
            assert probed.gap > 0
            assert probed.note
            assert "exact" not in NativeEngine(model, str, NativeConfig(), exact=probed.exact).capabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_rollout_logprobs_are_the_trainers_in_every_family(name: str, num_threads: int, dtype: torch.dtype) -> None:
    with threads(num_threads):
        probed = probe(decoder(4, 2, **FAMILIES[name]).config, dtype)
    if dtype == torch.bfloat16 and not probed.exact:
        pytest.skip(f"the probe finds bfloat16 not exact on this machine: {probed.note}")
    assert probed.exact, probed.note
    check_family(name, num_threads, dtype)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_probe_finds_float32_exact(num_threads: int) -> None:
    with threads(num_threads):
        configs = [decoder(*heads, width=8 * heads[0]).config for heads in HEADS]
        assert [probe(config, torch.float32).exact for config in configs] == [True] * len(HEADS)


def test_in_a_row_of_700_tokens() -> None:
    check_long()


def test_on_policy_after_new_weights() -> None:
    check_new_weights()


AGAIN: dict[str, Callable[[], None]] = {
    "heads": lambda: check((9, 3)),
    "threads": lambda: check(num_threads=2),
    "many-threads": lambda: check_family("gemma", 3),
    "adapter": check_adapter,
    "long": check_long,
    "new-weights": check_new_weights,
    **{name: partial(check_family, name) for name in FAMILIES},
}


@pytest.mark.parametrize("scene", AGAIN.values(), ids=AGAIN)
def test_of_steps_that_are_run_as_they_were_written_down(scene: Callable[[], None]) -> None:
    check_again(scene)


def test_at_the_first_step_kl_is_0_and_ratios_are_1() -> None:
    check_first_step()


def test_the_temperature_is_the_requests() -> None:
    check_temperature()


# ---------------------------------------------------------------------------------------------------- breakers


def _linear_by_batch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A small batch is summed in another order than a large one, as happens without padding on some machines."""
    if len(x) > 16:
        return _LINEAR(x, weight, bias)
    first = (torch.arange(x.shape[1]) < x.shape[1] // 2).to(x.dtype)
    return _LINEAR(x * first, weight, None) + _LINEAR(x * (1 - first), weight, bias)


def _values_cut_by_width(p: Tensor, v: Tensor) -> Tensor:
    """Partial sums that depend on the padded width and not on the position of a key; one product may do so or not, by machine."""
    half = p.shape[2] // 2
    return torch.bmm(p[:, :, :half], v[:, :half]) + torch.bmm(p[:, :, half:], v[:, half:])


def _trainer_without_temperature(decoder: Decoder, hidden: Tensor, targets: Tensor, temperature: Tensor, **named: Any) -> Any:
    return _TOKEN_LOGPROBS(decoder, hidden, targets, torch.ones_like(temperature), **named)


def _gate_by_size(gates: Tensor, up: Tensor, activation: str) -> Tensor:
    """As torch shares an element-wise function by its size: an odd rest runs scalar code. Here: few rows get other arithmetic."""
    assert activation == "gelu_tanh"
    return F.gelu(gates, approximate="tanh" if len(gates) > 16 else "none") * up


def _nobody_has_temperature(temperature: Tensor) -> Tensor:
    return torch.ones_like(temperature)


def _rows_move_without_their_cache(self: KVCache, source: Tensor, target: Tensor, length: int) -> None:
    pass


async def _stale_cache(self: NativeEngine, source: WeightSource, policy: PolicyRef) -> None:
    cache = self._cache
    await _LOAD_WEIGHTS(self, source, policy)
    self._cache = cache


def _adapter_in_training_only(self: LoraLinear, x: Tensor) -> Tensor:
    return _LORA_LINEAR(self, x) if torch.is_grad_enabled() else self.base(x)


def _kl_with_rounding(logprobs: Tensor, ref: Tensor, **how: Any) -> Tensor:
    """k3 from probabilities, whose logarithms are not to the bit what went in."""
    back = logprobs.exp().log()
    return (ref - back).exp() - 1 - (ref - back)


def _one_token_too_many_in_common(rows: prefixes.Ints, sizes: prefixes.Ints) -> prefixes.Ints:
    found = _SHARED(rows, sizes)
    found[1:-1] = np.minimum(found[1:-1] + 1, np.minimum(sizes[1:], sizes[:-1]))
    return found


def _one_way_for_all_sizes(*_: Any) -> tuple[int, ...]:
    """A step that was written down for a short window is run for a longer one."""
    return ()


_LINEAR = numerics.linear
_SHARED = prefixes._shared
_LORA_LINEAR = LoraLinear.__call__
_TOKEN_LOGPROBS = output_heads.token_logprobs
_LOAD_WEIGHTS = NativeEngine.load_weights

BREAKERS = [
    Breaker(5, "linear-by-batch", "tandem.models.numerics:linear", _linear_by_batch, check),
    Breaker(5, "values-cut-by-width", "tandem.models.numerics:attention_values", _values_cut_by_width, check_long),
    Breaker(5, "trainer-ignores-temperature", "tandem.models.heads:token_logprobs", _trainer_without_temperature, check),
    Breaker(5, "nobody-has-temperature", "tandem.models.heads:_divisor", _nobody_has_temperature, check_temperature),
    Breaker(5, "reference-by-batch", "tandem.models.numerics:linear", _linear_by_batch, check_first_step),
    Breaker(5, "kl-with-rounding", "tandem.algos.extra_terms:kl_divergence", _kl_with_rounding, check_first_step),
    Breaker(5, "rows-move-without-cache", "tandem.models.kv_cache:KVCache.copy", _rows_move_without_their_cache, check),
    Breaker(5, "gate-by-size", "tandem.models.numerics:gate", _gate_by_size, lambda: check_family("gemma")),
    Breaker(5, "adapter-in-training-only", "tandem.models.lora:LoraLinear.__call__", _adapter_in_training_only, check_adapter),
    Breaker(5, "one-token-too-many-in-common", "tandem.models.prefixes:_shared", _one_token_too_many_in_common, check),
    Breaker(5, "one-way-for-all-sizes", "tandem.models.numerics:choices", _one_way_for_all_sizes, lambda: check_again(check_long)),
    Breaker(5, "stale-cache", "tandem.rollout.native:NativeEngine.load_weights", _stale_cache, check_new_weights),
]
