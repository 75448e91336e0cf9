"""The list of what a directory holds, by which damage is seen: each file's size and checksum, and its own checksum.

It knows files and JSON; which directory is a snapshot and which snapshot to use is snapshots.py's business.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from tandem.durable import dump, sync
from tandem.errors import SnapshotError
from tandem.types import Json

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """files: path within the directory -> (bytes, xxh3 checksum)."""

    step: int
    score: float | None
    fingerprint: dict[str, str]
    state: dict[str, Json]
    files: dict[str, tuple[int, str]]


def seal(directory: Path) -> dict[str, tuple[int, str]]:
    """Makes every file under `directory` durable; their sizes and checksums."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        sync(path)
    return {str(path.relative_to(directory)): (path.stat().st_size, _checksum(path)) for path in files}


def write(directory: Path, manifest: Manifest) -> None:
    """Writes the manifest and makes it and all directories durable."""
    body = {"format": FORMAT, **asdict(manifest)}
    (directory / NAME).write_text(dump({"checksum": _digest(body), **body}), encoding="utf-8", errors="backslashreplace")
    sync(directory / NAME)
    for path in (directory, *directory.rglob("*")):
        if path.is_dir():
            sync(path)


def read(directory: Path) -> Manifest:
    """The manifest alone; SnapshotError where it is missing, damaged, or of another format."""
    file = directory / NAME
    try:
        body: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        checksum, form = body.pop("checksum"), body.pop("format")
        intact = checksum == _digest({"format": form, **body})
    except OSError as error:
        raise SnapshotError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(f"{file} is damaged: {error}") from error
    if not intact:
        raise SnapshotError(f"{file} is damaged: it does not match its own checksum")
    if form != FORMAT:
        raise SnapshotError(f"{file} has format {form} and this Tandem reads format {FORMAT}")
    files = {name: (int(size), str(value)) for name, (size, value) in cast("dict[str, list[Any]]", body.pop("files")).items()}
    return Manifest(files=files, **body)


def verify(directory: Path) -> Manifest:
    """The manifest, once every file is found as it was written; SnapshotError names the first that is not."""
    manifest = read(directory)
    for name, (size, checksum) in manifest.files.items():
        file = directory / name
        try:
            found = file.stat().st_size
            intact = found == size and _checksum(file) == checksum
        except FileNotFoundError as error:
            raise SnapshotError(f"{file} is missing") from error
        except OSError as error:
            raise SnapshotError(f"{file} cannot be read: {error.strerror or error}") from error
        if not intact:
            why = f"{found} bytes instead of {size}" if found != size else "its checksum does not match"
            raise SnapshotError(f"{file} is damaged: {why}")
    return manifest


def _checksum(path: Path, block: int = 1 << 20) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(block):
            digest.update(data)
    return digest.hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(dump(body).encode(errors="backslashreplace"))
