"""Run snapshots on disk: whole or not there, checked before they are used, the last good one never given up.

    snapshots/
      step-00000020/                    a good one
        manifest.json                   step, score, state, fingerprint, and each file's size and checksum
        train/ ...                      one directory a part, filled by its owner
      step-00000040.partial-4711/       being written by process 4711: made durable, then renamed

Parts are written by their owners (engine, queue); the store knows bytes and names, and imports no torch. It decides
neither when to write nor what belongs to a snapshot.

Crash points: `snapshot.begin`, `snapshot.part.NAME` (before each), `snapshot.after_parts`, `snapshot.manifest` (files
are durable, the manifest is not written), `snapshot.before_rename`, `snapshot.after_rename`, `snapshot.retention` (an
old one is out of the list, its files are still there).
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from tandem.checkpoint import manifest
from tandem.checkpoint.manifest import Manifest
from tandem.durable import attempt, room, sync
from tandem.errors import SnapshotError, TandemError
from tandem.faults import crash_point
from tandem.types import Json

Part = Callable[[Path], Awaitable[None] | None]

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.partial-(\d+)")


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """Which snapshots stay: the newest `keep_last`, and with `keep_best` the one of the highest score besides."""

    keep_last: int = 2
    keep_best: bool = True

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last} would keep no snapshot to resume from; use 1 or more")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot whose checksums hold. warnings: what the user should be told about it, in words."""

    path: Path
    step: int
    state: Mapping[str, Json]
    score: float | None
    warnings: tuple[str, ...] = ()

    def part(self, name: str) -> Path:
        """The directory that the part's owner filled."""
        path = self.path / name
        if not path.is_dir():
            raise SnapshotError(f"snapshot {self.path} has no part {name!r}; resume it with the recipe that wrote it")
        return path


class SnapshotStore:
    """The snapshots of one run, written by one process at a time.

    fingerprint: what a resumed run's bits depend on (`tandem.device.fingerprint`); it is stored, and a snapshot made
    under another one is given back with a warning. What dead processes left half-written is removed here.
    """

    def __init__(self, directory: Path, config: SnapshotConfig, fingerprint: Mapping[str, str]) -> None:
        self._directory = directory
        self._config = config
        self._fingerprint = dict(fingerprint)
        with attempt(f"open {directory}", directory):
            directory.mkdir(parents=True, exist_ok=True)
            for path in list(directory.iterdir()):
                partial = _PARTIAL.fullmatch(path.name)
                if partial and not _alive(int(partial[1])):
                    shutil.rmtree(path)

    # ------------------------------------------------------------------------------------------------- writing

    async def write(self, step: int, parts: Mapping[str, Part], state: Mapping[str, Json], *, score: float | None = None) -> Path:
        """Writes a snapshot; it is durable when this returns, and the older ones are thinned out.

        parts: name -> a function that fills the directory it is given. score: higher is better, for `keep_best`.
        Raises SnapshotError, and leaves nothing of this snapshot behind, where it cannot be written or where a good
        one of this step is there already (a damaged one is replaced).
        """
        crash_point("snapshot.begin")
        final = self._path(step)
        async with self._draft(final) as partial:
            for name, fill in parts.items():
                crash_point(f"snapshot.part.{name}")
                await _fill(partial / name, fill)
            crash_point("snapshot.after_parts")
            files = manifest.seal(partial)
            crash_point("snapshot.manifest")
            manifest.write(partial, Manifest(step, score, self._fingerprint, dict(state), files))
            crash_point("snapshot.before_rename")
        crash_point("snapshot.after_rename")
        with attempt(f"remove old snapshots in {self._directory}", self._directory):
            self._thin_out(step)
        return final

    @asynccontextmanager
    async def _draft(self, final: Path) -> AsyncGenerator[Path]:
        """A directory that takes the name `final` if all goes well, and disappears otherwise."""
        partial = self._aside(final)
        try:
            with attempt(f"write snapshot {final}", self._directory):
                self._make_way(final)
                partial.mkdir()
                yield partial
                partial.rename(final)
                sync(self._directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _make_way(self, final: Path) -> None:
        if not final.exists():
            return
        try:
            manifest.verify(final)
        except SnapshotError:
            shutil.rmtree(final)
        else:
            raise SnapshotError(f"snapshot {final} is there already; resume from it, or choose another run.dir")

    def _thin_out(self, newest: int) -> None:
        """Removes what the configuration does not keep, among the snapshots up to `newest`, which always stays."""
        steps = [step for step in self.steps if step <= newest]
        keep = {*steps[: self._config.keep_last]}
        if self._config.keep_best:
            keep.update(self._by_score(steps)[:1])
        for step in steps:
            if step not in keep:
                aside = self._aside(self._path(step))
                self._path(step).rename(aside)
                crash_point("snapshot.retention")
                shutil.rmtree(aside)

    # ------------------------------------------------------------------------------------------------- reading

    def latest(self) -> Snapshot | None:
        """The newest good snapshot; None where there never was one.

        A damaged one is passed over, with a warning in the result. Raises SnapshotError where all are damaged.
        """
        return self._first_good(self.steps)

    def best(self) -> Snapshot | None:
        """The good snapshot of the highest score (of equals the newest); None where none has a score."""
        return self._first_good(self._by_score(self.steps))

    def at(self, step: int) -> Snapshot | None:
        """That of a step; None where there is none. Raises SnapshotError where it is damaged."""
        if step not in self.steps:
            return None
        found = manifest.verify(self._path(step))
        return Snapshot(self._path(step), found.step, found.state, found.score)

    def _first_good(self, steps: Iterable[int]) -> Snapshot | None:
        damages: list[str] = []
        for step in steps:
            path = self._path(step)
            try:
                found = manifest.verify(path)
            except SnapshotError as error:
                damages.append(str(error))
                continue
            warnings = [f"{damage}; {path.name} is used instead" for damage in damages]
            warnings += self._differences(path, found.fingerprint)
            return Snapshot(path, found.step, found.state, found.score, tuple(warnings))
        if damages:
            raise SnapshotError(
                f"no good snapshot is left in {self._directory}: {'; '.join(damages)}; "
                "put one back from a copy, or start again with another run.dir"
            )
        return None

    def _differences(self, path: Path, saved: Mapping[str, str]) -> list[str]:
        current = self._fingerprint
        differ = [
            f"{name} {saved.get(name, 'unknown')} (now {current.get(name, 'unknown')})"
            for name in sorted({*saved, *current})
            if saved.get(name) != current.get(name)
        ]
        if not differ:
            return []
        return [f"{path.name} was written under {', '.join(differ)}: the resumed run may differ from an undisturbed one"]

    @property
    def steps(self) -> list[int]:
        """Steps of all snapshots, good or not, newest first."""
        found = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _by_score(self, steps: Iterable[int]) -> list[int]:
        """Those that have a score, best first, of equals the newest first."""
        scored: list[tuple[float, int]] = []
        for step in steps:
            try:
                score = manifest.read(self._path(step)).score
            except SnapshotError:
                continue
            if score is not None:
                scored.append((score, step))
        return [step for _, step in sorted(scored, reverse=True)]

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"

    def _aside(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.partial-{os.getpid()}")


async def _fill(directory: Path, fill: Part) -> None:
    os.mkdir(directory)
    try:
        waiting = fill(directory)
        if inspect.isawaitable(waiting):
            await waiting
    except TandemError:
        raise
    except (RuntimeError, SafetensorError) as error:  # how torch.save and safetensors report a full disk
        raise SnapshotError(f"cannot write snapshot part {directory}: {error}; {room(directory)}") from error


def _alive(process: int) -> bool:
    """True where another process has that number; if it is ours, a dead process had it before us."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
