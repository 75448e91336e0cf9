"""Files that survive being killed and a full disk: append-only JSON lines, and files that appear whole or not at all.

What takes long to write can be written beside whatever else goes on. Every OSError becomes a SnapshotError that says what could not
be written, where, and how much room is left there. It does not know what the records mean.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from tandem.errors import SnapshotError
from tandem.faults import crash_point
from tandem.types import Json


@contextmanager
def attempt(action: str, where: Path) -> Generator[None]:
    """Turns an OSError inside into a SnapshotError: "cannot `action`", why, and the room left at `where`."""
    try:
        yield
    except SnapshotError:
        raise
    except OSError as error:
        raise SnapshotError(f"cannot {action}: {error.strerror or error}; {room(where)}") from error


def room(where: Path) -> str:
    """How much is free on the disk of the nearest directory that holds `where`, and what to do about it."""
    holder = next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(holder).free
    return f"{free / 1e6:,.1f} MB are free at {holder}: make room there or choose another disk, then resume"


def sync(path: Path) -> None:
    """The file, or the directory's list of names, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """`path` holds `text`, or what it held before; a reader never sees a part of it."""
    draft = draft_of(path)
    with attempt(f"write {path}", path):
        try:
            draft.write_text(text, encoding="utf-8", errors="backslashreplace")
            sync(draft)
            crash_point(f"file.{path.name}.before")
            draft.replace(path)
            crash_point(f"file.{path.name}.after")
        finally:
            draft.unlink(missing_ok=True)
        sync(path.parent)


def beside(name: str, work: Callable[[], None]) -> Future[None]:
    """`work` in a thread of that name, which does not keep the process from ending; what it raises is raised by the result."""
    done = Future[None]()
    done.set_running_or_notify_cancel()  # whoever gives up waiting does not cancel it

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 raised where the result is asked for
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def draft_of(path: Path) -> Path:
    """What a process that was killed while it wrote `path` leaves, until `path` is written again."""
    return path.with_name(f".{path.name}.draft")


def dump(record: Mapping[str, Json]) -> str:
    """Strict JSON on one line: NaN and infinity are refused (ValueError), since no other reader takes them."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def records(path: Path) -> Iterator[dict[str, Json]]:
    """The records of a file of JSON lines; a torn last line is left out, a broken one before it is a SnapshotError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record: object = json.loads(line)
            except ValueError as error:
                raise SnapshotError(f"{path}, line {number} is not JSON ({error}); mend or delete that line") from error
            if not isinstance(record, dict):
                raise SnapshotError(f"{path}, line {number} is not an object; mend or delete that line")
            yield cast("dict[str, Json]", record)


class AppendLog:
    """A file of JSON lines that is only appended to, except that resuming cuts it back to where a snapshot saw it.

    A line that a killed process left torn is cut off when the file is opened; a line that does not fit on the disk
    is cut off at once. Crash points: `log.NAME.before`, `.during`, `.after`, with NAME the file's name without suffix.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with attempt(f"open {path}", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            self._size = _end_of_last_line(path)
            self._file.truncate(self._size)

    def append(self, record: Mapping[str, Json]) -> None:
        """Writes one line; it is in the hands of the operating system, though not yet on the disk, when this returns."""
        name = self.path.stem
        line = dump(record).encode(errors="backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape
        crash_point(f"log.{name}.before")
        try:
            with attempt(f"write a line of {self.path}", self.path):
                self._write(line[: len(line) // 2])
                crash_point(f"log.{name}.during")
                self._write(line[len(line) // 2 :])
        except SnapshotError:
            self._file.truncate(self._size)
            raise
        self._size += len(line)
        crash_point(f"log.{name}.after")

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def offset(self) -> int:
        """Bytes so far, all of them on the disk: what a snapshot remembers."""
        with attempt(f"write {self.path}", self.path):
            os.fsync(self._file.fileno())
        return self._size

    def truncate(self, offset: int) -> None:
        """Forgets every line after `offset`, so that a resumed run does not write them a second time."""
        if offset > self._size:
            warnings.warn(
                f"{self.path} has {self._size} bytes where the snapshot saw {offset}: lines are lost; the run goes on without them",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        with attempt(f"write {self.path}", self.path):
            self._file.truncate(offset)
            self._size = offset
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _end_of_last_line(path: Path, block: int = 1 << 16) -> int:
    """Offset behind the last newline; 0 where there is none."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0
