"""Runs the tests against each mutant in a process of its own, forked from one that has imported and collected everything.

Where a fault lies in a function, the fork gives that function its new code, and runs tests of that line. What has run when
the modules were imported (defaults, constants, the table and what completes it) does not notice: there the fork imports
everything again, with the fault in it, and runs all tests. Tests that have killed a neighbour go first, so that only survivors
meet all of them. A mutant is killed by the first failing test, or by using more processor time than any test needs. One that
cannot be imported is stillborn, and not counted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import os
import pickle
import resource
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.mutants.mutations import Mutant, Source

ROOT = Path(__file__).parents[2]
PACKAGE = "tandem.algos"
EXCLUDED = {"notes": "it is text", "describe": "it lays the table out as text, and no number of a run comes of it"}
TESTS = ("tests/golden", "tests/algos")
NOT_RUN = {"test_unbiased.py"}
"""It and the laws take ten times as long as all these; a mutant that only they would kill counts as a survivor."""
MADE_AT_IMPORT = {"rows", "functions", "composition", "columns", "table", "terms", "checks"}
"""Modules whose functions have run when the table is imported, and are not noticed afterwards."""
SECONDS = 60
"""Of processor time. All tests together take a fifth of it."""
MOST_KILLERS = 12
"""So many tests go first where everything is imported again, and so many before it is."""


class Fate(IntEnum):
    """Exit statuses of a fork."""

    SURVIVED = 10
    KILLED = 11
    STILLBORN = 12
    HANGS = 13


def sources(only: Sequence[str] = ()) -> list[Source]:
    """Of every module that is mutated, or of these."""
    found = [Source(f"{PACKAGE}.{path.stem}", path) for path in sorted((ROOT / "src/tandem/algos").glob("*.py"))]
    return [each for each in found if each.path.stem not in EXCLUDED and (not only or each.module in only)]


def check(chosen: Sequence[Source], workers: int, tell: Callable[[Mutant, Fate], None]) -> None:
    """The fate of every mutant, told as it is known."""
    files = [str(path) for name in TESTS for path in sorted((ROOT / name).glob("test_*.py")) if path.name not in NOT_RUN]
    status = pytest.main(_arguments(files), plugins=[_Parent(chosen, workers, tell)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"the tests cannot be collected: pytest ended with {status!r}")


def _arguments(tests: Sequence[str]) -> list[str]:
    options = ["-o", "addopts=", "-qqq", "-s", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestWarning"]
    return [*options, "-m", "not slow", *tests]


# -------------------------------------------------------------------------------------------------------- parent


@dataclass
class _Quick:
    """A property that fails has failed: no time is spent on the smallest example, and a busy machine fails nothing."""

    def pytest_configure(self) -> None:
        settings.register_profile(
            "mutants",
            settings.get_profile("tandem"),
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("mutants")


@dataclass
class _Parent(_Quick):
    chosen: Sequence[Source]
    workers: int
    tell: Callable[[Mutant, Fate], None]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests, failure, late = _measured(lambda: (*_lines_of_tests(session.items), [*sys.modules]))
        if failure:
            raise SystemExit(f"{failure} fails without any fault")
        for name in late:
            if name.partition(".")[0] not in ("tandem", "tests") and name not in sys.modules:
                with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                    importlib.import_module(name)  # once here, and not in every fork
        seconds: defaultdict[Path, float] = defaultdict(float)
        for item in session.items:
            seconds[item.path] += tests[item.nodeid].seconds
        by_file = sorted(session.items, key=lambda item: (seconds[item.path], tests[item.nodeid].seconds))
        anew = [item.nodeid for item in by_file]
        if _in_fork(lambda: _run_anew(None, [*anew[-MOST_KILLERS:], *anew])) != Fate.SURVIVED:
            raise SystemExit("the tests fail when everything is imported again, without any fault")
        by_scope = sorted(session.items, key=lambda item: (len(tests[item.nodeid].lines), item.nodeid))
        running: dict[int, Mutant] = {}
        with tempfile.TemporaryDirectory() as folder:
            killers = _Killers(Path(folder))
            for source in self.chosen:
                for mutant in source.mutants:
                    here = [item for item in by_scope if tests[item.nodeid].lines & mutant.places]
                    here.sort(key=killers.of_function(mutant))
                    made_at_import = _live(mutant) is None or source.path.stem in MADE_AT_IMPORT
                    if made_at_import:  # which meets all tests below
                        here = here[:MOST_KILLERS]
                    first = killers.of_module(mutant) if made_at_import else []
                    work = functools.partial(_run, source, mutant, here, [*first, *anew] if made_at_import else [], killers)
                    running[_fork(work, SECONDS)] = mutant
                    if len(running) >= self.workers:
                        self._wait(running, killers)
            while running:
                self._wait(running, killers)
        return True

    def _wait(self, running: dict[int, Mutant], killers: _Killers) -> None:
        pid, status = os.wait()
        mutant = running.pop(pid)
        killers.learn(mutant, pid)
        self.tell(mutant, _fate(status))


@dataclass
class _Killers:
    """Which tests have killed mutants, as forks write it down: tests by name, the last one first, by function and by module."""

    folder: Path
    found: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def write(self, test: str) -> None:
        """For a fork."""
        (self.folder / str(os.getpid())).write_text(test)

    def learn(self, mutant: Mutant, pid: int) -> None:
        written = self.folder / str(pid)
        if not written.exists():
            return
        test = written.read_text()
        written.unlink()
        for place in (mutant.module, mutant.key[0]):
            self.found[place] = [test, *(each for each in self.found[place] if each != test)]

    def of_function(self, mutant: Mutant) -> Callable[[pytest.Item], int]:
        """The rank of a test."""
        ranks = {name: rank for rank, name in enumerate(self.found[mutant.key[0]])}
        return lambda item: ranks.get(item.nodeid, len(ranks))

    def of_module(self, mutant: Mutant) -> list[str]:
        """A few tests, those of the function first."""
        return [*dict.fromkeys([*self.found[mutant.key[0]], *self.found[mutant.module]])][:MOST_KILLERS]


# ---------------------------------------------------------------------------------------------------------- forks


def _fork(work: Callable[[], Fate], seconds: int = resource.RLIM_INFINITY) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status, terminal = 1, os.fdopen(os.dup(2), "w")
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        status = work()
    except BaseException:
        traceback.print_exc(file=terminal)
        raise
    finally:
        terminal.flush()
        os._exit(status)


def _fate(status: int) -> Fate:
    if os.WIFSIGNALED(status):
        return Fate.HANGS
    if os.WEXITSTATUS(status) not in list(Fate):
        raise SystemExit("a fork ended before its tests did: that is a fault of the check itself")
    return Fate(os.WEXITSTATUS(status))


def _in_fork(work: Callable[[], Fate]) -> Fate:
    return _fate(os.waitpid(_fork(work), 0)[1])


def _measured(work: Callable[[], Any]) -> Any:
    """What `work` gives in a fork, so that this process stays as it is."""
    with tempfile.NamedTemporaryFile() as file:

        def write() -> Fate:
            Path(file.name).write_bytes(pickle.dumps(work()))
            return Fate.SURVIVED

        _in_fork(write)
        return pickle.loads(Path(file.name).read_bytes())


@dataclass
class _Run(_Quick):
    """Runs tests in a given order until one fails; those that a fault has removed are left out."""

    order: Sequence[str]
    failure: str | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.failure = _first_failure([items[name] for name in self.order if name in items])
        return True


def _first_failure(items: Sequence[pytest.Item]) -> str | None:
    watch = _Watch()
    for item, following in zip(items, [*items[1:], None], strict=False):
        if not item.config.pluginmanager.is_registered(watch):
            item.config.pluginmanager.register(watch)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if watch.failed:
            return item.nodeid
    return None


@dataclass(eq=False)
class _Watch:
    failed: bool = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed


def _run(source: Source, mutant: Mutant, here: Sequence[pytest.Item], anew: Sequence[str], killers: _Killers) -> Fate:
    """Puts the fault into the function as it stands, and, where that does not kill it, into a module that is imported again."""
    function = _live(mutant)
    if function is not None and here:
        function.__code__ = _part(source.code(mutant), mutant.function.split(".")[: function.__qualname__.count(".") + 1])
        if failure := _first_failure(here):
            killers.write(failure)
            return Fate.KILLED
    return _run_anew((source, mutant), anew, killers) if anew else Fate.SURVIVED


def _live(mutant: Mutant) -> Any:
    """The function or method whose body the mutant is in, of nested ones the outer; None for a default or outside of any."""
    found: Any = sys.modules[mutant.module]
    for name in mutant.function.split(".") if mutant.function else ():
        found = vars(found).get(name)
        found = inspect.unwrap(getattr(found, "fget", getattr(found, "__func__", found)))
        if hasattr(found, "__code__"):
            return None if mutant.line == f"def {name}" else found
    return None


def _part(code: CodeType, path: Sequence[str]) -> CodeType:
    for name in path:
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
    return code


def _run_anew(fault: tuple[Source, Mutant] | None, names: Sequence[str], killers: _Killers | None = None) -> Fate:
    _forget()
    if fault is not None:
        source, mutant = fault
        sys.meta_path.insert(0, _Faulty(source.module, source.path, source.code(mutant)))
    try:
        _import_all()
    except Exception:  # noqa: BLE001  a fault may raise anything
        return Fate.STILLBORN
    for file, of_file in itertools.groupby(names, lambda name: name.partition("::")[0]):
        run = _Run([*of_file])
        status = pytest.main(_arguments([file]), plugins=[run])
        if run.failure and killers:
            killers.write(run.failure)
        if run.failure or status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR):
            return Fate.KILLED
    return Fate.SURVIVED


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tandem", "tests")]:
        del sys.modules[name]


def _import_all() -> None:
    for path in sorted((ROOT / "src/tandem/algos").glob("*.py")):
        importlib.import_module(PACKAGE if path.stem == "__init__" else f"{PACKAGE}.{path.stem}")


@dataclass
class _Faulty(importlib.machinery.SourceFileLoader):
    """Finds one module, and gives it other code than its file has."""

    module: str
    file: Path
    code: CodeType

    def __post_init__(self) -> None:
        super().__init__(self.module, str(self.file))

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.file, loader=self) if name == self.module else None

    def get_code(self, fullname: str) -> CodeType:
        return self.code


# ----------------------------------------------------------------------------------------------------- measuring


@dataclass
class _Trace:
    """lines: (module, line) that ran."""

    seconds: float = 0.0
    lines: set[tuple[str, int]] = field(default_factory=set)


def _traced(chosen: Sequence[Source], work: Callable[[], object]) -> _Trace:
    modules = {str(source.path): source.module for source in chosen}
    lines: defaultdict[str, set[int]] = defaultdict(set)

    def line(frame: FrameType, event: str, argument: object) -> Any:
        lines[frame.f_code.co_filename].add(frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line(frame, event, argument) if frame.f_code.co_filename in modules else None

    threading.settrace(call)
    sys.settrace(call)
    begun = time.process_time()
    try:
        work()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return _Trace(time.process_time() - begun, {(modules[file], number) for file in lines for number in lines[file]})


def _lines_of_tests(items: Sequence[pytest.Item]) -> tuple[dict[str, _Trace], str | None]:
    """By name of a test; and a test that fails, if one does."""
    found: dict[str, _Trace] = {}
    every = sources()
    for item in items:
        failure: list[str | None] = []
        found[item.nodeid] = _traced(every, lambda item=item, to=failure: to.append(_first_failure([item])))
        if failure != [None]:
            return found, item.nodeid
    return found, None
