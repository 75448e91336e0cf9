"""Batches for tests of what trains: ragged rows with a prompt, sampled tokens and, here and there, an observation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.algos.aggregation import Aggregation, loss_weights
from tandem.data_proto import DataProto
from tandem.models.adapters import LoraConfig
from tandem.models.auto import AutoDecoder
from tandem.models.decoder import Decoder, init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.models.lora import add_lora
from tandem.types import Key

VOCAB = 16
TINY = DecoderConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=128
)
LORA = LoraConfig(rank=3, alpha=6.0)


def tiny_decoder(seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """Random weights five times larger than usual, so that its predictions are far from uniform."""
    decoder = init_decoder(TINY, seed, dtype)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return decoder


def tiny_lora(seed: int = 0, dtype: torch.dtype = torch.float32, config: LoraConfig = LORA, *, fresh: bool = False) -> Decoder:
    """`tiny_decoder` with an adapter: one that has learned something, or one as it begins."""
    decoder = tiny_decoder(seed, dtype)
    add_lora(decoder, config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name and not fresh:
                parameter.normal_(0.0, 0.1, generator=generator)
    return decoder


_AUTO: Mapping[str, Mapping[str, object]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "gpt_neox": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
}


def tiny_auto(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, *, vocab: int = VOCAB) -> AutoDecoder:
    """A model of transformers that the decoder does not support, with random weights five times larger than usual."""
    config = AutoConfig.for_model(kind, vocab_size=vocab, bos_token_id=0, eos_token_id=0, **_AUTO[kind])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return AutoDecoder(model, dtype)


def make_rows(lengths: list[int], seed: int = 0, *, aggregation: Aggregation = "token-mean", space: str = "train") -> DataProto:
    """Rows of these lengths (at least 2), with every column that a policy loss reads; the first token is never sampled."""
    generator = torch.Generator().manual_seed(seed)
    num = sum(lengths)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    mask = torch.rand(num, generator=generator) < 0.7
    mask[starts] = False
    mask[starts + 1] = True

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(num, generator=generator)

    sizes = torch.tensor(lengths)
    return DataProto.make(
        (Key(space, i) for i in range(len(lengths))),
        sizes,
        token={
            "tokens": torch.randint(VOCAB, (num,), generator=generator),
            "mask": mask,
            "old_logprobs": torch.where(mask, -2.5 + noise(0.3), 0.0),
            "ref_logprobs": torch.where(mask, -2.5 + noise(0.3), 0.0),
            "advantages": torch.where(mask, noise(1.0), 0.0),
            "values": torch.where(mask, noise(0.1), 0.0),
            "returns": torch.where(mask, 2 + noise(0.1), 0.0),
            "loss_weights": loss_weights(mask, sizes, aggregation=aggregation),
        },
        row={"temperature": torch.ones(len(lengths))},
    )
