"""Models of transformers, from a directory and back: what does it is imported only where a recipe names that library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from tandem.models.language_model import LanguageModel
from tandem.registry import resolve


def load(path: Path, dtype: torch.dtype) -> LanguageModel:
    """See auto.load_auto. Raises RegistryError where transformers is missing."""
    load_auto = cast("Callable[..., LanguageModel]", resolve("tandem.models.auto:load_auto", {}, kind="library"))
    return load_auto(path, dtype)


def save(model: LanguageModel, path: Path) -> None:
    """See auto.save_auto."""
    cast("Callable[..., None]", resolve("tandem.models.auto:save_auto", {}, kind="library"))(model, path)
