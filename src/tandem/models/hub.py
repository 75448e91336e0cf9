"""A model's files from the Hugging Face hub, by its id; they stay in the cache that every library shares.

This file alone imports huggingface_hub.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

from tandem.errors import ModelError

_WANTED = ["*.json", "*.safetensors", "*.jinja"]


def fetched(name: str) -> Path:
    """The directory with the files of OWNER/NAME. Raises ModelError where they cannot be had."""
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except (OSError, ValueError, RuntimeError) as error:  # the hub's own errors are of these kinds
        reason = " ".join(str(error).split())
        raise ModelError(
            f"there is no file or directory {name}, and the model cannot be fetched from the hub: {reason[:200]}; import a file "
            "or a directory that you have"
        ) from error
