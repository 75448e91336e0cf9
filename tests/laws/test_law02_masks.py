"""Law 2: masks come from lengths and provenance, never from a token's value.

Pad == EOS changes nothing; an EOS that the policy sampled is trained on, one that the framework appended is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.algos import aggregation
from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.data_proto import DataProto, Side
from tandem.models.heads import row_logprobs
from tandem.train.config import TrainConfig
from tandem.train.fake import FakeTrainEngine
from tandem.train.torch_engine import TorchEngine
from tandem.types import Key, PolicyRef, Sample
from tests.laws.breaking import Breaker
from tests.train.rows import VOCAB, make_rows, tiny_decoder

PAD = EOS = 0
SFT = loss_ref(configure("sft"))


def _rows_full_of_pad() -> DataProto:
    """Rows whose own tokens are the pad id here and there, at their ends too."""
    batch = make_rows([5, 9, 3])
    tokens = torch.where(torch.arange(batch.num_tokens) % 3 == 0, PAD, batch["tokens"])
    tokens[[offset - 1 for offset in batch.offsets[1:]]] = PAD
    mask = batch["mask"].clone()
    mask[[offset - 1 for offset in batch.offsets[1:]]] = True
    weights = aggregation.loss_weights(mask, batch.lengths)
    return batch.with_columns(token={"tokens": tokens, "mask": mask, "loss_weights": weights})


def _gradient(batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    engine = TorchEngine(tiny_decoder(), TrainConfig())
    _, out = engine.forward_backward(batch, SFT)
    return out["logprobs"], {name: p.grad for name, p in engine.decoder.named_parameters() if p.grad is not None}


def check_tokens_that_look_like_padding_are_trained_on() -> None:
    batch = _rows_full_of_pad()
    logprobs, gradients = _gradient(batch)
    assert bool((logprobs[batch["mask"]] < 0).all())
    renamed = torch.where(batch["tokens"] == PAD, VOCAB - 1, batch["tokens"])
    assert not torch.equal(_gradient(batch.with_columns(token={"tokens": renamed}))[0], logprobs)
    for side in ("left", "right"):
        for value in (PAD, 7):
            again = _through_padding(batch, side, value, width=12)
            assert torch.equal(again["tokens"], batch["tokens"])
            same_logprobs, same_gradients = _gradient(again)
            assert torch.equal(same_logprobs, logprobs)
            assert all(torch.equal(same_gradients[name], gradient) for name, gradient in gradients.items())


def _through_padding(batch: DataProto, side: Side, value: float, width: int) -> DataProto:
    padded = {name: batch.pad(name, side=side, value=value if name == "tokens" else 0, width=width) for name in batch.token_level}
    row = {"temperature": batch["temperature"]}
    return DataProto.pack(batch.keys, batch.valid(side=side, width=width), token=padded, row=row)


def check_what_pads_a_row_and_how_far_changes_nothing() -> None:
    decoder, batch = tiny_decoder(), _rows_full_of_pad()
    narrow = row_logprobs(decoder, batch.pad("tokens"), batch.lengths, batch.pad("mask"), batch["temperature"])[0]
    for width in (9, 10, 17, 40):
        for value in (PAD, 7):
            tokens, mask = batch.pad("tokens", value=value, width=width), batch.pad("mask", width=width)
            wide = row_logprobs(decoder, tokens, batch.lengths, mask, batch["temperature"])[0]
            assert torch.equal(wide[:, :9], narrow)
            assert not bool(wide[:, 9:].any())


def check_a_sampled_eos_is_trained_on_and_an_appended_one_is_not() -> None:
    def sample(member: int, sampled: bool) -> Sample:
        mask = [False, True, True, sampled]
        policy = ((PolicyRef(), sum(mask)),)
        return Sample(Key("train", 0, member), [3, 4, 5, EOS], mask, [-1.0 * m for m in mask], policy, "stop")  # type: ignore[arg-type]

    for sampled in (True, False):
        batch = DataProto.from_samples([sample(0, sampled)])
        batch = batch.with_columns(token={"loss_weights": aggregation.loss_weights(batch["mask"], batch.lengths)})
        engine = FakeTrainEngine(VOCAB, TrainConfig())
        _, out = engine.forward_backward(batch, SFT)
        assert engine.table.grad is not None
        trained = bool(engine.table.grad[5].any())  # the row of what follows token 5: the EOS
        assert trained == sampled
        assert bool(out["logprobs"][3] != 0) == sampled


def test_tokens_that_look_like_padding_are_trained_on() -> None:
    check_tokens_that_look_like_padding_are_trained_on()


def test_what_pads_a_row_and_how_far_changes_nothing() -> None:
    check_what_pads_a_row_and_how_far_changes_nothing()


def test_a_sampled_eos_is_trained_on_and_an_appended_one_is_not() -> None:
    check_a_sampled_eos_is_trained_on_and_an_appended_one_is_not()


def _mask_without_pad_ids(decoder: Any, tokens: Tensor, lengths: Tensor, mask: Tensor, *rest: Any) -> Any:
    return row_logprobs(decoder, tokens, lengths, mask & (tokens != PAD), *rest)


_from_samples = DataProto.from_samples


def _every_eos_counts(samples: list[Sample]) -> DataProto:
    batch = _from_samples(samples)
    return batch.with_columns(token={"mask": batch["mask"] | (batch["tokens"] == EOS)})


def _pad_ids_are_not_tokens(self: DataProto, name: str, **how: Any) -> Tensor:
    padded = _pad(self, name, **how)
    return padded & (_pad(self, "tokens", width=how.get("width")) != PAD) if padded.dtype == torch.bool else padded


_pad = DataProto.pad

BREAKERS = [
    Breaker(
        law=2,
        name="pad ids are masked out by value",
        target="tandem.train.outputs:row_logprobs",
        replacement=_mask_without_pad_ids,
        check=check_tokens_that_look_like_padding_are_trained_on,
    ),
    Breaker(
        law=2,
        name="padding hides real tokens",
        target="tandem.data_proto:DataProto.pad",
        replacement=_pad_ids_are_not_tokens,
        check=check_tokens_that_look_like_padding_are_trained_on,
    ),
    Breaker(
        law=2,
        name="every EOS counts as sampled",
        target="tandem.data_proto:DataProto.from_samples",
        replacement=staticmethod(_every_eos_counts),
        check=check_a_sampled_eos_is_trained_on_and_an_appended_one_is_not,
    ),
]
