"""A model's files from the Hugging Face hub, by its id; they stay in the cache that every library shares.

This file alone imports huggingface_hub.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from tandem.errors import ModelError

_WANTED = ["*.json", "*.safetensors", "*.jinja"]


def fetched(name: str) -> Path:
    """The directory with the files of OWNER/NAME. Raises ModelError where they cannot be had."""
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except HFValidationError as error:
        raise ModelError(f"there is no file or directory {name}, and it is no id of a model on the hub: {error}") from error
    except HfHubHTTPError as error:  # the hub is reached, and says no
        raise ModelError(
            f"there is no file or directory {name}, and the hub gives no such model ({error.response.status_code}): correct the "
            f"name or, where it asks for a login, set HF_TOKEN"
        ) from error
    except OSError as error:
        raise ModelError(
            f"there is no file or directory {name}, and the hub, where such a model may be, is not reached from this machine: "
            f"fetch the model elsewhere and give the path of its directory or .gguf file"
        ) from error
