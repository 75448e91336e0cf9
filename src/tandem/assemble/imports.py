"""From what people have, a GGUF file or a Hugging Face directory, here or on a hub, to a directory that every command reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch

from tandem.assemble.model import whole_directory
from tandem.errors import ModelError
from tandem.models.decoder import Decoder
from tandem.models.hf import load_decoder, save_decoder
from tandem.registry import resolve
from tandem.text.gguf import gguf_tokenizer
from tandem.text.tokenizer import Tokenizer, load_tokenizer

Dtype = Literal["float32", "bfloat16", "float16"]


def import_model(source: str, directory: Path, dtype: Dtype = "float32") -> str:
    """Writes the model and the tokenizer of `source` into `directory`, which is made, with weights of type `dtype`; in words, what.

    source: a .gguf file, a directory, or else the id of a model on the Hugging Face hub. Raises ModelError where there is no such
    model or the decoder does not compute it, RegistryError where a package is missing, SnapshotError for what cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(f"{directory} is there and not an empty directory: give one that import can make")
    decoder, tokenizer = _loaded(source)
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise ModelError(
            f"{source} has {tokenizer.vocab_size} tokens in its tokenizer and {decoder.config.vocab_size} in its model"
        )
    with whole_directory(directory) as partial:
        save_decoder(decoder, partial, tokenizer.eos_id, getattr(torch, dtype))
        tokenizer.save(partial)
    count = sum(parameter.numel() for parameter in decoder.parameters())
    chats = "with" if tokenizer.template is not None else "without"
    return f"{count:,} parameters in {dtype}, {tokenizer.vocab_size} tokens, {chats} a chat template"


def _loaded(source: str) -> tuple[Decoder, Tokenizer]:
    path = Path(source)
    if path.is_file():
        load_gguf = cast(
            "Callable[[Path], tuple[Decoder, Mapping[str, Any]]]", resolve("tandem.models.gguf:load_gguf", {}, kind="reader")
        )
        decoder, metadata = load_gguf(path)
        return decoder, gguf_tokenizer(metadata, source)
    if not path.is_dir():
        if source.count("/") != 1 or source.startswith((".", "/")):
            raise ModelError(f"there is no file or directory {source}, and it is no id of a model on the hub, such as owner/name")
        path = cast("Callable[[str], Path]", resolve("tandem.models.hub:fetched", {}, kind="hub"))(source)
    return load_decoder(path), load_tokenizer(path)
