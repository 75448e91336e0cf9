"""What TorchEngine does beyond the contract of its port."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.algos.terms import LossInputs, TokenLoss
from tandem.errors import ConfigError, EngineError, ModelError, NonFiniteError
from tandem.models.decoder import init_decoder
from tandem.models.hf import save_decoder
from tandem.train import outputs
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.types import LossRef, Metrics
from tests.train.rows import TINY, make_rows, tiny_decoder

SFT = loss_ref(configure("sft"))
GRPO = loss_ref(configure("grpo"))


def steep_loss(inputs: LossInputs) -> TokenLoss:
    """0 with an infinite gradient."""
    return TokenLoss({"steep": (inputs.policy_logprobs - inputs.policy_logprobs.detach()).sqrt()}, Metrics())


def hollow_loss(inputs: LossInputs) -> TokenLoss:
    """NaN wherever a token counts."""
    return TokenLoss({"hollow": inputs.policy_logprobs.sqrt()}, Metrics())


def two_terms(inputs: LossInputs) -> TokenLoss:
    return TokenLoss({"one": inputs.policy_logprobs, "half": 0.5 * inputs.policy_logprobs}, Metrics())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the token tables that went through the model."""
    shapes: list[tuple[int, int]] = []

    def watched(decoder: object, tokens: Tensor, *rest: object) -> object:
        shapes.append(tuple(tokens.shape))
        return whole(decoder, tokens, *rest)

    whole = outputs.row_logprobs
    monkeypatch.setattr(outputs, "row_logprobs", watched)
    return shapes


def test_passes_keep_the_token_budget_and_long_rows_pass_alone(passes: list[tuple[int, int]]) -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig(micro_batch_tokens=16))
    engine.forward_backward(make_rows([5, 30, 3, 8, 2, 6]), SFT)
    assert passes == [(4, 6), (1, 8), (1, 30)]


def test_rows_without_a_masked_token_do_not_pass(passes: list[tuple[int, int]]) -> None:
    batch = make_rows([5, 9, 3])
    mask = batch["mask"] & (batch.row_of_token != 1)
    TorchEngine(tiny_decoder(), TrainConfig()).forward(batch.with_columns(token={"mask": mask}), frozenset({"logprobs"}))
    assert passes == [(2, 5)]


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e9])
def test_a_step_is_adamw_on_the_clipped_gradient(max_grad_norm: float) -> None:
    """Two steps: in the first, the bias correction hides the betas."""
    slow, fast = 0.6, 0.7
    config = TrainConfig(lr=0.1, betas=(slow, fast), eps=1e-3, weight_decay=0.01, warmup_steps=2, max_grad_norm=max_grad_norm)
    engine = TorchEngine(tiny_decoder(), config)
    named = dict(engine.decoder.named_parameters())
    first = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    second = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for step, lr in ((1, 0.05), (2, 0.1)):
        engine.forward_backward(make_rows([6, 4]), GRPO)
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        gradients = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        metrics = engine.step().values_by_name()
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert norm > 0.05
        assert metrics["train/lr"] == lr
        for name, gradient in gradients.items():
            clipped = gradient * min(1.0, max_grad_norm / norm)
            first[name] = slow * first[name] + (1 - slow) * clipped
            second[name] = fast * second[name] + (1 - fast) * clipped**2
            mean, square = first[name] / (1 - slow**step), second[name] / (1 - fast**step)
            want = before[name] * (1 - lr * 0.01) - lr * mean / (square.sqrt() + 1e-3)
            torch.testing.assert_close(named[name].detach(), want, atol=1e-5, rtol=1e-4)


def test_only_the_top_layers_and_what_comes_after_them_change(tmp_path: Path) -> None:
    """Weight decay, which would move what has no gradient but is stepped along, included."""
    config = TrainConfig(lr=0.05, weight_decay=0.1, top_layers=1)
    decoder = init_decoder(replace(TINY, num_layers=3, tie_embeddings=False), 0)
    before = {name: weight.clone() for name, weight in decoder.weights().items()}
    engine = TorchEngine(decoder, config)
    for seed in range(2):
        engine.forward_backward(make_rows([6, 4], seed), GRPO)
        engine.step()
    changed = {name for name, weight in decoder.weights().items() if not torch.equal(weight, before[name])}
    above = {"model.norm.weight", "lm_head.weight"} | {name for name in before if name.startswith("model.layers.2.")}
    assert changed == above
    engine.save(tmp_path)
    again = TorchEngine(init_decoder(decoder.config, 1), config)
    again.load(tmp_path)
    for each in (engine, again):
        each.forward_backward(make_rows([6, 4], 2), GRPO)
        each.step()
    for name, weight in decoder.weights().items():
        assert torch.equal(weight, again.decoder.weights()[name]), name


def test_a_tied_embedding_is_below_every_layer() -> None:
    decoder = tiny_decoder()
    TorchEngine(decoder, TrainConfig(top_layers=TINY.num_layers))
    assert [name for name, parameter in decoder.named_parameters() if not parameter.requires_grad] == ["model.embed_tokens.weight"]
    TorchEngine(decoder, TrainConfig())
    assert all(parameter.requires_grad for parameter in decoder.parameters())
    with pytest.raises(ConfigError, match="top_layers=3 are to be trained, and the model has 2 layers: lower it"):
        TorchEngine(decoder, TrainConfig(top_layers=3))


def test_a_gradient_that_is_not_finite_is_refused_and_named() -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig(max_nonfinite=0))
    before = [parameter.detach().clone() for parameter in engine.decoder.parameters()]
    metrics, _ = engine.forward_backward(make_rows([4, 3]), LossRef("tests.train.test_torch_engine:steep_loss"))
    assert metrics["train/loss"].value == 0
    with pytest.raises(NonFiniteError, match=r"the gradient of model\..* is not finite; 1 steps in a row"):
        engine.step()
    assert all(torch.equal(now, then) for now, then in zip(engine.decoder.parameters(), before, strict=True))


def test_a_loss_that_is_not_finite_names_its_term_and_row() -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig(max_nonfinite=0))
    metrics, _ = engine.forward_backward(make_rows([4, 3, 5]), LossRef("tests.train.test_torch_engine:hollow_loss"))
    assert metrics["train/loss"].value == 0
    with pytest.raises(NonFiniteError, match=r"loss term 'hollow' is nan in row train:\d\.0\.0"):
        engine.step()


def test_a_column_that_is_not_finite_is_named_with_its_row() -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig(max_nonfinite=0))
    batch = make_rows([4, 3, 5])
    at = int(batch["mask"].nonzero()[-1])
    old = batch["old_logprobs"].clone()
    old[at] = torch.nan
    metrics, _ = engine.forward_backward(batch.with_columns(token={"old_logprobs": old}), GRPO)
    assert "train/ratio" not in metrics
    with pytest.raises(NonFiniteError, match=r"column 'old_logprobs' is nan at token 4 of row train:2\.0\.0"):
        engine.step()


@pytest.mark.parametrize(
    ("weight", "says"), [(3e38, "sum of a loss term is not finite, in rows"), (1e30, "gradient's norm is inf")]
)
def test_numbers_that_grow_too_large_are_refused(weight: float, says: str) -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig(max_nonfinite=0))
    batch = make_rows([4, 3, 5])
    engine.forward_backward(batch.with_columns(token={"loss_weights": weight * batch["mask"]}), SFT)
    with pytest.raises(NonFiniteError, match=says):
        engine.step()


def test_each_term_of_a_loss_is_reported() -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig(micro_batch_tokens=8))
    metrics = engine.forward_backward(make_rows([4, 3, 5]), LossRef("tests.train.test_torch_engine:two_terms"))[0].values_by_name()
    assert metrics["train/loss_half"] == pytest.approx(metrics["train/loss_one"] / 2)
    assert metrics["train/loss"] == pytest.approx(1.5 * metrics["train/loss_one"])


def test_metrics_of_micro_batches_are_those_of_the_whole() -> None:
    whole, cut = (
        TorchEngine(tiny_decoder(), TrainConfig(micro_batch_tokens=tokens)).forward_backward(make_rows([6, 4, 9, 3]), GRPO)[0]
        for tokens in (1000, 1)
    )
    assert cut.values_by_name() == pytest.approx(whole.values_by_name(), rel=1e-5, abs=1e-7)
    assert cut["train/ratio"].count == make_rows([6, 4, 9, 3])["mask"].sum()


def test_bf16_products_train_float32_masters() -> None:
    engine = TorchEngine(tiny_decoder(dtype=torch.bfloat16), TrainConfig(lr=0.01))
    batch = make_rows([6, 4, 9])
    losses: list[float] = []
    for _ in range(10):
        losses.append(engine.forward_backward(batch, SFT)[0]["train/loss"].value)
        engine.step()
    assert losses[-1] < losses[0] - 0.3
    assert all(parameter.dtype == torch.float32 for parameter in engine.decoder.parameters())
    _, out = engine.forward_backward(batch, SFT)
    assert torch.equal(out["logprobs"], engine.forward(batch, frozenset({"logprobs"}))["logprobs"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_activation_checkpointing_keeps_less_and_gives_the_same_bits(dtype: torch.dtype) -> None:
    kept: list[int] = []
    engines = [TorchEngine(tiny_decoder(dtype=dtype), TrainConfig(activation_checkpointing=on)) for on in (False, True)]
    for engine in engines:
        elements = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal elements
            elements += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.decoder.prefill(make_rows([60, 60])["tokens"].view(2, 60))
        kept.append(elements)
        engine.forward_backward(make_rows([6, 4, 9, 3]), SFT)
    assert kept[1] < kept[0] / 2
    for plain, again in zip(*(engine.decoder.parameters() for engine in engines), strict=True):
        assert plain.grad is not None
        assert again.grad is not None
        assert torch.equal(plain.grad, again.grad)


def test_shards_are_the_storage_that_a_rollout_engine_reads() -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig())
    shards = {shard.name: shard.tensor for shard in engine.weight_shards()}
    engine.forward_backward(make_rows([6, 4]), SFT)
    engine.step()
    for name, parameter in engine.decoder.named_parameters():
        assert shards[name].data_ptr() == parameter.data_ptr()
        assert torch.equal(shards[name], parameter)


def test_loading_keeps_the_storage(tmp_path: Path) -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig())
    places = [parameter.data_ptr() for parameter in engine.decoder.parameters()]
    engine.save(tmp_path)
    engine.load(tmp_path)
    assert [parameter.data_ptr() for parameter in engine.decoder.parameters()] == places


def test_a_tied_output_layer_is_listed_with_its_owner() -> None:
    tied = TorchEngine(tiny_decoder(), TrainConfig()).layout().specs
    assert {spec.name: spec.tied_to for spec in tied}["lm_head.weight"] == "model.embed_tokens.weight"
    untied = TorchEngine(init_decoder(replace(TINY, tie_embeddings=False), 0), TrainConfig()).layout().specs
    assert {spec.name: spec.tied_to for spec in untied}["lm_head.weight"] is None


def test_an_optimiser_that_is_reset_steps_as_a_new_one() -> None:
    config = TrainConfig(lr=0.01)
    engine = TorchEngine(tiny_decoder(), config)
    for seed in range(3):
        engine.forward_backward(make_rows([4, 7, 3], seed), GRPO)
        engine.step()
    kept, new = (TorchEngine(copy.deepcopy(engine.decoder), config) for _ in range(2))
    kept._optimizer.state = copy.deepcopy(engine._optimizer.state)
    engine.reset_optimizer()
    for each in (engine, new, kept):
        each.forward_backward(make_rows([5, 2], 9), GRPO)
        each.step()
    ours, theirs, others = ([shard.tensor for shard in each.weight_shards()] for each in (engine, new, kept))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


def test_weights_from_a_directory_come_with_an_optimiser_that_begins_anew(tmp_path: Path) -> None:
    """And counts stay: the schedule goes on."""
    config = TrainConfig(lr=0.1, schedule="linear", total_steps=10)
    engine, fresh = TorchEngine(tiny_decoder(), config), TorchEngine(tiny_decoder(7), config)
    save_decoder(tiny_decoder(7), tmp_path)
    for seed in range(2):
        engine.forward_backward(make_rows([4, 7, 3], seed), GRPO)
        engine.step()
    engine.load_weights(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(engine.decoder.parameters(), fresh.decoder.parameters(), strict=True))
    fresh.config = replace(config, schedule="constant", lr=0.08)  # the schedule's third
    for each in (engine, fresh):
        each.forward_backward(make_rows([5, 2], 9), GRPO)
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(engine.decoder.parameters(), fresh.decoder.parameters(), strict=True))


def test_a_directory_of_another_model_changes_nothing(tmp_path: Path) -> None:
    save_decoder(init_decoder(replace(TINY, num_layers=1), 0), tmp_path / "shallow")
    save_decoder(tiny_decoder(7), tmp_path / "same")
    engine, untouched = TorchEngine(tiny_decoder(), TrainConfig()), tiny_decoder()
    with pytest.raises(ModelError, match=r"missing model\.layers\.1\."):
        engine.load_weights(tmp_path / "shallow")
    engine.forward_backward(make_rows([4, 3]), GRPO)
    with pytest.raises(EngineError, match="belongs to the weights as they are"):
        engine.load_weights(tmp_path / "same")
    assert all(torch.equal(a, b) for a, b in zip(engine.decoder.parameters(), untouched.parameters(), strict=True))
