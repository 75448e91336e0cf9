"""Putting the adapter of a recipe into a model, here or in a worker: what does it is imported only if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from tandem.models.adapters import LoraConfig
from tandem.models.language_model import LanguageModel
from tandem.registry import resolve


def put_adapter(model: LanguageModel, config: LoraConfig, seed: int, origin: str | None = None) -> None:
    """See lora.add_lora. Raises RegistryError where the package that it needs is missing."""
    add_lora = cast("Callable[..., None]", resolve("tandem.models.lora:add_lora", {}, kind="adapter"))
    add_lora(model, config, seed, origin=origin)
