"""Tensors in a directory of safetensors files, as one rank or many wrote them, through torch.distributed.checkpoint.

Imported only where ranks are many, or where many wrote: it takes longer to import than a small state takes to read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def write(path: Path, tensors: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Called by every rank; each writes what it holds. group: in which nobody meets meanwhile. Raises OSError."""
    with _as_os_error():
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group)


def shapes(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Of all tensors there. Raises OSError where that cannot be read, or a part is missing."""
    with _as_os_error():
        found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    tensors = {name: meta for name, meta in found.items() if isinstance(meta, TensorStorageMetadata)}
    for name, meta in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in meta.chunks) != math.prod(meta.size):
            raise OSError(f"a part of {name} is missing in {path}")
    return {name: tuple(meta.size) for name, meta in tensors.items()}


def read(path: Path, like: Mapping[str, Tensor], *, alone: bool) -> Mapping[str, Tensor]:
    """New tensors that are held as those of `like` are; alone: this rank calls without the others. Raises OSError."""
    found = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in like.items()}
    with _as_os_error(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not asked for
        state_dict_loader.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone)
    return found


@contextmanager
def _as_os_error() -> Generator[None]:
    """The library gathers what went wrong on each rank into an exception of its own."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"on rank {rank}: {cause}") from error
