"""The directory of a run: made, put aside for a new run, or gone on with; and kept to one process.

It knows nothing of what a run writes there but its config.yaml and its snapshots.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from rich.console import Console

from tandem import device
from tandem.checkpoint.snapshots import SnapshotStore
from tandem.config import Resolved, dump, flatten
from tandem.durable import attempt, draft_of, write_whole
from tandem.errors import ConfigError, SnapshotError, UserError
from tandem.recipe import Recipe, load_recipe
from tandem.track.runs import FAILURE
from tandem.track.summary import read_summary
from tandem.trainer.episodes import first_error

Begun: TypeAlias = Callable[[], None]
"""Called when the directory of a run is there: from then on it can be gone on with."""

_CONTINUES = (
    "seed",
    "model.",
    "data.",
    "warmup.",
    "agent.",
    "algorithm.name",
    "lora",
    "rollout.group",
    "reference.",
    "teacher.",
    "reward_model.",
    "critic.path",
    "process_model.path",
)
"""Values that a resumed run must share with what it goes on with."""


@contextmanager
def open_directory(directory: Path, resolved: Resolved[Recipe], resume: bool, console: Console) -> Generator[None]:
    """Leaves an earlier run aside, or checks that it can be gone on with, and keeps others out until the run ends.

    A run that a mistake of the user's ends before anything was measured or trained leaves no directory; one that was resumed
    leaves what it found, such as a queue's rows. What fails leaves its reason there. Raises ConfigError for a directory of
    something else, one that is in use, and a resumed run that would be another one.
    """
    config = directory / "config.yaml"
    if resume:
        for said in changed_values(directory, resolved):
            console.print(said, markup=False)
    elif taken := next((path for path in (directory, *directory.parents) if os.path.lexists(path) and not path.is_dir()), None):
        raise ConfigError(f"the run's directory cannot be {directory}, since {taken} is no directory: choose another run.dir")
    elif directory.is_dir() and any(path != draft_of(config) for path in directory.iterdir()):
        if not config.is_file():
            raise ConfigError(f"{directory} is not empty and holds no run (no config.yaml): choose another run.dir")
        if Path.cwd().is_relative_to(directory.resolve()):
            raise ConfigError(
                f"{directory} holds a run, which cannot be put aside while it is the working directory: "
                f"choose another run.dir, or go on with it by --resume"
            )
        with _alone(directory):
            number = next(i for i in range(1, 1_000_000) if not directory.with_name(f"{directory.name}.{i}").exists())
            aside = directory.rename(directory.with_name(f"{directory.name}.{number}"))
        console.print(f"the earlier run in {directory} is kept as {aside}", markup=False)
    _make(directory)
    with _alone(directory):
        if resume and steps_done(resolved.value) >= resolved.value.trainer.steps:
            console.print(f"all {resolved.value.trainer.steps} steps are done: nothing is left to train", markup=False)
        else:
            write_whole(config, dump(resolved))
        (directory / FAILURE).unlink(missing_ok=True)
        try:
            with ExitStack() as stack:
                stack.push(partial(_note_failure, directory))
                yield
        except UserError:
            if not (resume or _holds_work(directory)):
                shutil.rmtree(directory)
            raise


def changed_values(directory: Path, resolved: Resolved[Recipe]) -> list[str]:
    """A line for each value that a resumed run has and the run in `directory` had not.

    Raises ConfigError where there is no run, and for values that would make it another one.
    """
    config = directory / "config.yaml"
    if not config.is_file():
        raise ConfigError(f"there is no run in {directory} to resume (no config.yaml): leave --resume out to begin one")
    before = load_recipe(config, ()).value
    earlier = dict(flatten(before))
    before.trainer.schedule.check_resumable(resolved.value.trainer.schedule, directory)
    changes = {leaf: value for leaf, value in flatten(resolved.value) if earlier.get(leaf) != value and not leaf.startswith("run.")}
    if other := [f"{leaf}={changes[leaf]} (it had {earlier.get(leaf)})" for leaf in changes if leaf.startswith(_CONTINUES)]:
        raise ConfigError(f"{directory} holds another run, and cannot be resumed with {', '.join(other)}: choose another run.dir")
    return [f"resuming with {leaf}={value} where the run had {earlier.get(leaf)}" for leaf, value in changes.items()]


def _holds_work(directory: Path) -> bool:
    """Whether a phase left a measurement or a snapshot there."""
    metrics = any(path.stat().st_size for path in directory.glob("**/metrics.jsonl"))
    return metrics or any(directory.glob("**/snapshots/step-*"))


def _make(directory: Path) -> None:
    with attempt(f"make the directory {directory}", directory):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ConfigError(
                f"the run's directory cannot be {directory}, where nothing can be written ({error.strerror}): choose another "
                f"run.dir"
            ) from None


@contextmanager
def _alone(directory: Path) -> Generator[None]:
    """Locks the directory for this process. Raises ConfigError where another one has it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{directory} is in use by a run that has not ended: wait for it, or choose another run.dir"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _note_failure(directory: Path, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
    """For `tandem runs` and `tandem show`; what interrupts a run is no failure, but sys.exit, which its own code calls, is."""
    if isinstance(error, Exception | SystemExit):
        first = first_error(error)
        with suppress(SnapshotError):  # where the disk is full, which is what failed then
            write_whole(directory / FAILURE, f"{type(first).__name__}: {first}\n")


def finished(resolved: Resolved[Recipe]) -> str:
    """What to say of a run that has left its model and its summary after as many steps as the recipe asks for; else nothing.

    Raises ConfigError as `changed_values` does.
    """
    directory = resolved.value.run.directory
    changed_values(directory, resolved)
    summary = read_summary(directory / "summary.json")
    if summary is None or summary.steps < resolved.value.trainer.steps or not (directory / "final").is_dir():
        return ""
    return f"{directory} is finished, with {summary.steps} steps: trainer.steps=N, with more of them, and --resume go further"


def steps_done(recipe: Recipe) -> int:
    """By the last good snapshot of the main phase; 0 where there is none to go on from."""
    path = recipe.run.directory / "snapshots"
    found = SnapshotStore(path, recipe.snapshots, device.fingerprint()).latest() if path.is_dir() else None
    return 0 if found is None else found.step
