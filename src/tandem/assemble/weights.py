"""From the recipe's section `checkpoint` to the engine that publishes: which transports fit the runtime, and why others do not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import cast

import torch

from tandem import device
from tandem.assemble.model import Model
from tandem.checkpoint.collective import Collective
from tandem.checkpoint.disk import Disk
from tandem.checkpoint.in_place import InPlace
from tandem.checkpoint.publisher import CheckpointConfig, Publisher
from tandem.checkpoint.shared_memory import SharedMemory
from tandem.checkpoint.transport import Transport
from tandem.errors import ConfigError
from tandem.ports import RolloutEngine
from tandem.recipe import Recipe
from tandem.types import Metrics

_PROBE = (2, 16)  # rows of so many tokens


def build_checkpoint(
    recipe: Recipe,
    model: Model,
    logs: Path,
    told: Callable[[], Metrics] = Metrics,
    beside: Sequence[RolloutEngine] = (),
    returned: Callable[[], Collection[RolloutEngine]] = tuple,
) -> Publisher:
    """logs: a directory of the phase, beside which weights that go through files are. told, beside, returned: see Publisher.

    Raises ConfigError for what does not fit.
    """
    config, one_process = recipe.checkpoint, recipe.placement.name == "inline"
    if one_process and config.name not in ("auto", "in_place"):
        raise ConfigError(
            f"checkpoint.name={config.name} with runtime=inline: trainer and engine read the same weights in one process, and "
            "there is nothing to move. Leave checkpoint.name out, or choose runtime=process"
        )
    if one_process and config.encoding.startswith("delta"):
        raise ConfigError(f"checkpoint.encoding={config.encoding} with runtime=inline: nothing is sent there; leave it out")
    if not one_process and config.name == "in_place":
        raise ConfigError(
            f"checkpoint.name=in_place with runtime={recipe.placement.name}: the trainer's weights are in other processes; choose "
            "shared_memory, collective or disk, or leave it to auto"
        )
    return Publisher(_transports(recipe, config, logs), config, _probe(model), told, beside, returned)


def _transports(recipe: Recipe, config: CheckpointConfig, logs: Path) -> Sequence[Transport]:
    bucket_bytes = config.bucket_mb << 20
    if recipe.placement.name == "inline":
        return [InPlace()]
    if config.name == "disk":
        return [Disk(config.directory or logs.with_name("weights"), bucket_bytes)]
    collective = Collective("127.0.0.1", device.select("cpu"), bucket_bytes, config.limit_s)
    match config.name:
        case "shared_memory":
            return [SharedMemory()]
        case "collective":
            return [collective]
        case _:
            return [SharedMemory(), collective]


def _probe(model: Model) -> list[list[int]]:
    """Rows of any tokens: what is compared is what two ends make of the same ones."""
    rows, length = _PROBE
    shape = (rows, max(2, min(length, model.decoder.max_positions or length)))
    tokens = torch.randint(model.decoder.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return cast("list[list[int]]", tokens.tolist())
