"""What is known of a model before it is built."""

from __future__ import annotations

import pytest

from tandem.assemble.model import check_memory, count_parameters
from tandem.errors import ConfigError
from tandem.models.decoder import Decoder
from tandem.models.decoder_config import DecoderConfig
from tests.models.tiny import config


@pytest.mark.parametrize(
    "shape",
    [
        config(),
        config(num_layers=1, tie_embeddings=False),
        config(num_layers=5, attention_bias=True, output_bias=True, mlp_bias=True, unrotated=(3, 4)),
        config(num_layers=3, qk_norm=True, head_dim=32),
    ],
)
def test_parameters_are_counted_before_they_are_there(shape: DecoderConfig) -> None:
    assert count_parameters(shape) == sum(parameter.numel() for parameter in Decoder(shape).parameters())


def test_what_does_not_fit_is_told_with_its_parts() -> None:
    check_memory({"weights": 1 << 20})
    with pytest.raises(ConfigError, match=r"would hold 1,280\.0 GiB .*: weights 1,024\.0 GiB, critic 256\.0 GiB; choose a smaller"):
        check_memory({"weights": 1 << 40, "reference": 1 << 20, "critic": 1 << 38})
