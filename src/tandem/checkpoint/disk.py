"""Through files in a directory that both ends see, of this machine or of many: safetensors, and for each rank a list of its files.

    DIR/weights-NUMBER/rank-INDEX-GROUP.safetensors   pieces, at most a bucket in each file
    DIR/weights-NUMBER/rank-INDEX.json                which pieces are in which file: written last, whole or not at all

Only the last two numbers are kept. What is here serves a publish, not a crash: nothing waits for the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, cast

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from tandem.checkpoint.packing import Entry, Part, buckets, listed, unlisted
from tandem.checkpoint.transport import Outlet, Seen, this_host
from tandem.errors import EngineError
from tandem.weights import OpenedWeights, Room, WeightBlock, WeightPatch, WeightPiece, WeightShard, nowhere


class DiskSender:
    """Implements transport.Sender."""

    def __init__(self, directory: Path, bucket_bytes: int, index: int, blocks: Sequence[WeightBlock]) -> None:
        self._directory, self._bucket_bytes, self._index = directory, bucket_bytes, index
        self._kept: list[Path] = []
        self.opened = OpenedWeights(this_host(), tuple(blocks), str(index))

    def send(self, number: int, pieces: Iterable[WeightPiece], seen: Seen) -> int:
        directory, size = _directory(self._directory, number), 0
        files: dict[str, str] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for group, bucket in enumerate(buckets(pieces, self.opened.blocks, self._bucket_bytes)):
                name = f"rank-{self._index}-{group}.safetensors"
                safetensors.torch.save_file(_tensors(bucket), directory / name)
                files[name] = listed([part.entry for part in bucket]).decode()
                size += sum(part.entry.size for part in bucket)
                for place, piece, _ in bucket:
                    if isinstance(piece, WeightShard):
                        seen(place, piece.tensor)
            temporary = directory / f".rank-{self._index}.json"
            temporary.write_text(json.dumps(files))
            os.replace(temporary, _list(directory, self._index))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"weights cannot be written to {directory}: {error}; choose another checkpoint.directory") from error
        self._kept.append(directory)
        if len(self._kept) > 2:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)  # another rank may have removed it
        return size

    def close(self) -> None:
        """The files are the transport's to remove."""


@dataclass(frozen=True, slots=True)
class DiskReader:
    """Implements transport.Reader. indexes: of the ranks."""

    directory: Path
    indexes: tuple[int, ...]

    def source(self, number: int) -> DiskSource:
        return DiskSource(_directory(self.directory, number), self.indexes)


class DiskSource:
    """Implements ports.WeightSource; opened where it is first looked at, so that it may travel. One file is held at a time."""

    shared = False

    def __init__(self, directory: Path, indexes: Sequence[int]) -> None:
        self._directory, self._indexes = directory, tuple(indexes)

    @cached_property
    def _files(self) -> list[tuple[Path, list[Entry]]]:
        """Raises EngineError where a rank's list is not there."""
        found = list[tuple[Path, list[Entry]]]()
        for index in self._indexes:
            try:
                files = cast("dict[str, str]", json.loads(_list(self._directory, index).read_text()))
            except (OSError, ValueError) as error:
                raise EngineError(f"the weights in {self._directory} cannot be read: {error}") from error
            found += [(self._directory / name, unlisted(data.encode())) for name, data in files.items()]
        return found

    @property
    def blocks(self) -> tuple[WeightBlock, ...]:
        return tuple(entry.block for _, entries in self._files for entry in entries)

    def shards(self, room: Room = nowhere) -> Iterator[WeightPiece]:
        del room
        for file, entries in self._files:
            try:
                tensors = safetensors.torch.load_file(file)
                pieces = [_piece(i, entry, tensors) for i, entry in enumerate(entries)]
            except (OSError, SafetensorError, KeyError) as error:
                raise EngineError(f"weights cannot be read from {file}: {error}") from error
            yield from pieces


class Disk:
    """Implements transport.Transport. directory: seen by all ranks and engines."""

    name: ClassVar[str] = "disk"
    moves: ClassVar[bool] = True
    far: ClassVar[bool] = True
    meets: ClassVar[bool] = False

    def __init__(self, directory: Path, bucket_bytes: int) -> None:
        self._directory, self._bucket_bytes = directory.absolute(), bucket_bytes

    def outlet(self, readers: int) -> Outlet:
        """What an earlier run left in the directory is removed."""
        self._count = readers
        self.close()
        return partial(DiskSender, self._directory, self._bucket_bytes)

    def readers(self, opened: Sequence[OpenedWeights]) -> Sequence[DiskReader]:
        return [DiskReader(self._directory, tuple(int(each.at) for each in opened))] * self._count

    def close(self) -> None:
        for left in self._directory.glob("weights-[0-9]*"):
            shutil.rmtree(left, ignore_errors=True)


def _directory(directory: Path, number: int) -> Path:
    return directory / f"weights-{number:06}"


def _list(directory: Path, index: int) -> Path:
    return directory / f"rank-{index}.json"


def _tensors(parts: Sequence[Part]) -> dict[str, Tensor]:
    """By the place of a piece in its file: a name says which weight it is, for people; the list says it for readers."""
    found: dict[str, Tensor] = {}
    for i, (_, piece, entry) in enumerate(parts):
        name = f"{i}:{entry.block.name}"
        if isinstance(piece, WeightPatch):
            found |= {f"{name}:gaps": piece.gaps, f"{name}:values": piece.values}
        else:
            tensor = piece.tensor.detach().to("cpu", entry.block.dtype).contiguous()
            found[name] = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
    return found


def _piece(i: int, entry: Entry, tensors: dict[str, Tensor]) -> WeightPiece:
    name = f"{i}:{entry.block.name}"
    if entry.changes is None:
        return WeightShard.of(entry.block, tensors[name])
    return WeightPatch(entry.block, tensors[f"{name}:gaps"], tensors[f"{name}:values"])
