"""What a training engine asks of the ranks that hold its model together. Here: one rank, which holds it alone.

An engine adds gradients up and decides; `Ranks` runs the model on weights that may be elsewhere, makes ranks agree, and
says which part of a weight is here. Every rank calls the same methods in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.models.language_model import LanguageModel

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_FILE = "whole.safetensors"

Part = tuple[tuple[int, ...], Tensor]  # offsets in the whole weight, and the block that starts there


class Ranks(Protocol):
    @property
    def index(self) -> int: ...

    @property
    def replicas(self) -> int:
        """How many whole copies of the model there are."""
        ...

    @property
    def replica(self) -> int:
        """Which of them this rank has a part of."""
        ...

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """Around whatever ranks do together: one that does not come in time is a StalledError, which names `what`."""
        ...

    def computing(self, what: str) -> AbstractContextManager[None]:
        """The same around a call of `run`s: what was gathered for them goes when it ends. Not beside another one."""
        ...

    def gather(self, value: T) -> Sequence[T]:
        """Every rank's value, in the order of ranks."""
        ...

    def run(self, function: Callable[Concatenate[LanguageModel, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """function(decoder, ...), where the decoder's parameters are whole."""
        ...

    def passing(self, *, last: bool) -> None:
        """Before each pass; the last one before a step's gradients are looked at says so."""
        ...

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """The global norm of gradients of which each rank has its part; the same number on all ranks."""
        ...

    def part(self, weight: Tensor) -> Part | None:
        """What this rank holds of a weight, without a copy; None where that is nothing."""
        ...

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Whole tensors, each once, to files in the new directory `path`; also beside other calls. Raises OSError."""
        ...

    def shapes(self, path: Path) -> Mapping[str, tuple[int, ...]]:
        """Of the tensors that `write` wrote at `path`, by however many ranks. Raises OSError where that cannot be read."""
        ...

    def read(self, path: Path, like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """New tensors that are held as those of `like` are, which have the shapes that `shapes` gives. Raises OSError."""
        ...


class OneRank:
    """Implements Ranks for a process that holds everything."""

    index = 0
    replicas = 1
    replica = 0

    def __init__(self, decoder: LanguageModel) -> None:
        self._decoder = decoder

    def meeting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def computing(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, value: T) -> Sequence[T]:
        return [value]

    def run(self, function: Callable[Concatenate[LanguageModel, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return function(self._decoder, *args, **kwargs)

    def passing(self, *, last: bool) -> None:
        pass

    def norm(self, gradients: Sequence[Tensor]) -> float:
        return float(torch.nn.utils.get_total_norm(gradients, foreach=False))

    def part(self, weight: Tensor) -> Part | None:
        return (0,) * weight.ndim, weight.detach()

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        path.mkdir(exist_ok=True)
        try:
            safetensors.torch.save_file(dict(tensors), path / _FILE)
        except SafetensorError as error:  # how its writer reports an OSError
            raise OSError(str(error)) from error

    def shapes(self, path: Path) -> Mapping[str, tuple[int, ...]]:
        if _of_many(path):
            return _shard_files().shapes(path)
        try:
            with cast("Any", safe_open(path / _FILE, "pt")) as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise OSError(str(error)) from error

    def read(self, path: Path, like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if _of_many(path):
            return _shard_files().read(path, like, alone=True)
        try:
            return safetensors.torch.load_file(path / _FILE)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _of_many(path: Path) -> bool:
    """Whether these files were written by the ranks of a sharded model."""
    return path.is_dir() and not (path / _FILE).exists()


def _shard_files() -> ModuleType:
    return import_module("tandem.train.shard_files")
