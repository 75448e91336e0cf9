"""Run snapshots on disk: whole or not there, checked before they are used, the last good one never given up.

    snapshots/
      step-00000020/                    a good one
        manifest.json                   step, score, state, fingerprint, and each file's size and checksum
        train/ ...                      one directory a part, filled by its owner
      step-00000040.partial-4711/       being written by process 4711: made durable, then renamed

Parts are written by their owners (engine, queue); the store knows bytes and names, and imports no torch. It decides
neither when to write nor what belongs to a snapshot. What is long to write may be copied first, and written while the run goes on:

    begin    parts are filled, or copied  ->  the run goes on
    finish   copies are written -> files are durable, manifest -> rename: from here on it is a snapshot -> old ones go

Crash points: `snapshot.begin`, `snapshot.part.NAME` (before each), `snapshot.copied` (the run goes on), `snapshot.after_parts`,
`snapshot.manifest` (files are durable, the manifest is not written), `snapshot.before_rename`, `snapshot.after_rename`,
`snapshot.retention` (an old one is out of the list, its files are still there).
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from tandem.checkpoint import manifest
from tandem.checkpoint.manifest import Manifest
from tandem.durable import attempt, beside, room, sync
from tandem.errors import SnapshotError, TandemError
from tandem.faults import crash_point
from tandem.types import Json

T = TypeVar("T")
Rest = Callable[[], Awaitable[None]]
"""What is left to do of something; may be called later, once."""
Part = Callable[[Path], Awaitable[Rest | None]]
"""Fills a directory, or copies what belongs there and gives what writes the copy."""

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
    under another one is given back with a warning, unless this one is empty, as where nothing is resumed. What dead processes left
    half-written is removed here.
    """

    def __init__(self, directory: Path, config: SnapshotConfig, fingerprint: Mapping[str, str]) -> None:
        self.directory = directory
        self._config = config
        self._fingerprint = dict(fingerprint)
        with attempt(f"open {directory}", directory):
            directory.mkdir(parents=True, exist_ok=True)
            for path in list(directory.iterdir()):
                draft = _PARTIAL.fullmatch(path.name)
                if draft and not _alive(int(draft[1])):
                    shutil.rmtree(path)

    # ------------------------------------------------------------------------------------------------- writing

    async def begin(self, step: int, parts: Mapping[str, Part], state: Mapping[str, Json], *, score: float | None = None) -> Rest:
        """Fills or copies the parts of a snapshot, so that the run may go on; calling what is returned makes it one.

        Then what is left of the parts is written beside whatever else goes on, the snapshot is durable, and the older ones are
        thinned out. parts: by name. score: higher is better, for `keep_best`. Both raise SnapshotError, and leave nothing of this
        snapshot behind, where it cannot be written or where a good one of this step is there already (a damaged one is replaced).
        """
        crash_point("snapshot.begin")
        final, rests = self._path(step), dict[Path, Rest]()
        about = Manifest(step, score, self._fingerprint, deepcopy(dict(state)), {})
        with ExitStack() as stack:
            draft = stack.enter_context(self._draft(final))
            for name, fill in parts.items():
                crash_point(f"snapshot.part.{name}")
                (draft / name).mkdir()
                if (rest := await _of_part(partial(fill, draft / name), draft / name)) is not None:
                    rests[draft / name] = rest
            drafting = stack.pop_all()
        crash_point("snapshot.copied")

        async def finish() -> None:
            with drafting:
                await _all(_of_part(rest, directory) for directory, rest in rests.items())
                crash_point("snapshot.after_parts")
                await asyncio.wrap_future(beside(f"making {final} durable", partial(_complete, draft, about)))
                crash_point("snapshot.before_rename")
                draft.rename(final)
                sync(self.directory)
            crash_point("snapshot.after_rename")
            with attempt(f"remove old snapshots in {self.directory}", self.directory):
                self._thin_out(step)

        return finish

    def written_bytes(self) -> int:
        """Of this process's drafts so far: it grows while something moves."""
        return sum(map(_size, self.directory.glob(f"{self._aside(Path('*')).name}/**/*")))

    @contextmanager
    def _draft(self, final: Path) -> Generator[Path]:
        """A new directory to fill and to rename to `final`; what is left of it disappears."""
        draft = self._aside(final)
        try:
            with attempt(f"write snapshot {final}", self.directory):
                self._make_way(final)
                draft.mkdir()
                yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

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
                f"no good snapshot is left in {self.directory}: {'; '.join(damages)}; "
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
        if not (current and differ):
            return []
        return [f"{path.name} was written under {', '.join(differ)}: the resumed run may differ from an undisturbed one"]

    @property
    def steps(self) -> list[int]:
        """Steps of all snapshots, good or not, newest first."""
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
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
        return self.directory / f"step-{step:08d}"

    def _aside(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.partial-{os.getpid()}")


async def _of_part(work: Callable[[], Awaitable[T]], directory: Path) -> T:
    """What `work` gives, which writes the part of a snapshot that is in `directory`."""
    try:
        return await work()
    except TandemError:
        raise
    except (RuntimeError, SafetensorError) as error:  # how torch.save and safetensors report a full disk
        raise SnapshotError(f"cannot write snapshot part {directory}: {error}; {room(directory)}") from error


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Until all have ended; raises what the first of those did that failed."""
    ends = await asyncio.gather(*works, return_exceptions=True)
    for error in ends:
        if error is not None:
            raise error


def _complete(draft: Path, about: Manifest) -> None:
    """All of it is on the disk, with its list."""
    files = manifest.seal(draft)
    crash_point("snapshot.manifest")
    manifest.write(draft, replace(about, files=files))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


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
