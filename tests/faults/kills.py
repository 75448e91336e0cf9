"""Killing a run at crash points, and seeing that nothing is left and that it goes on by itself, or can be gone on with."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.faults import mark
from tests.e2e.runs import forked, outcome
from tests.faults.settings import Setting, account

MARK = "TANDEM_TEST_RUN"
ENDED_BY_A_DEATH = ("trainer.restarts=0",)
_GONE_S = 90.0  # the agents of a Ray whose starter was killed take a minute


class UnreachedError(AssertionError):
    """A run that ended before it passed a point so often."""


class Run:
    """One run in `directory`, which is started, killed and gone on with."""

    def __init__(self, setting: Setting, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._setting = setting
        self._command = setting.command(directory)
        self._directory = directory
        self._run, self._log = directory / "run", directory / "log"
        self._mark = secrets.token_hex(8)

    def kill(self, at: str, *, by_itself: str = "") -> None:
        """Starts the run, or goes on with it, until ROLE/POINT:TIMES, which ends it; checks how, and that nothing of it is left.

        by_itself: it may go on by itself, each time until that point, and says this in the end.
        """
        role, _, point = at.rpartition("/")
        marks = self._marks()
        once = {"TANDEM_CRASH_ONCE": str(marks)} if role == "reward" else {}
        code, said = self._start({"TANDEM_CRASH_AT": at, **once}, *([] if by_itself else ENDED_BY_A_DEATH))
        assert by_itself in said
        if code == 0 and not (once and mark(marks, at).exists()):
            raise UnreachedError(f"{at} was not passed so often:\n{said}")
        match role:
            case "controller":
                assert code == -9, f"{at}: exit code {code}:\n{said}"
            case "reward" if point.startswith("judge.ready"):  # a module that kills whoever imports it is not imported twice
                assert code == 2, f"{at}: exit code {code}:\n{said}"
                assert "lost its worker, which was killed by SIGKILL while its module was imported" in " ".join(said.split())
            case "reward":  # the group is judged once more
                assert code == 0, f"{at}: exit code {code}:\n{said}"
            case "forkserver":
                assert code == 1, f"{at}: exit code {code}:\n{said}"
                assert "fork server" in said, f"{at}: nobody says who died:\n{said}"
            case _:
                rank = role.rpartition("-")[2]
                assert code == 1, f"{at}: exit code {code}:\n{said}"
                words = " ".join(said.split())
                assert f"rank {rank} (process" in words, f"{at}: nobody says who died:\n{said}"
                assert "was killed by SIGKILL" in words or "died (Ray: " in words, f"{at}: nobody says how:\n{said}"
                assert "go on with: tandem train" in words, f"{at}: nobody says what to do:\n{said}"
                assert "Traceback" not in said

    def outlive(self, kills: Sequence[str]) -> list[str]:
        """The same with workers that die at all of these, each once, and a run that goes on by itself; where they did die.

        It may end only where it came no further from one death to the next, with the error of the latter. Where engines
        die, others may go on.
        """
        marks = self._marks()
        code, said = self._start({"TANDEM_CRASH_AT": " ".join(kills), "TANDEM_CRASH_ONCE": str(marks)})
        died = [at for at in kills if mark(marks, at).exists()]
        missed = [at for at in died if not of_an_engine(at)]
        words = " ".join(said.split())
        going_on = re.findall(r"goes on by itself from (?:step \d+|its beginning) \(restart (\d+)\)", words)
        assert "Traceback" not in said
        if code == 0:
            assert bool(missed) <= len(going_on) <= len(died), f"{died}, and went on {len(going_on)} times:\n{said}"
            total = json.loads((self._run / "summary.json").read_text())["restarts"]
            assert total >= len(going_on), f"{total} restarts are counted:\n{said}"
        else:
            assert code == 1, f"{kills}: exit code {code}:\n{said}"
            assert len(going_on) < len(died), f"{died}, and went on {len(going_on)} times:\n{said}"
            assert "came no further since restart" in words, f"{kills}: nobody says why it does not go on:\n{said}"
            assert "go on with: tandem train" in words, f"{kills}: nobody says what to do:\n{said}"
        nameless = [at for at in missed if _who(at) not in words]
        together = max(0, len(missed) - len(going_on) - (code != 0))  # where two die at once, one is named
        assert len(nameless) <= together, f"nobody says who died: {nameless}\n{said}"
        return died

    def finish(self, trace: Path | None = None) -> dict[str, Any]:
        """Goes on to the end; what the run came to, of which its account holds. trace: a file for the points that are passed."""
        code, said = self._start({"TANDEM_CRASH_TRACE": str(trace)} if trace else {})
        assert code == 0, f"the run was gone on with, and ended with exit code {code}:\n{said}"
        account(self._run, self._setting)
        return came_to(self._run)

    @property
    def comparable(self) -> bool:
        """Whether it must end as the undisturbed run."""
        return self._setting.exact

    def _marks(self) -> Path:
        """A directory for the points where a process died."""
        marks = self._directory / f"marks-{secrets.token_hex(4)}"
        marks.mkdir()
        return marks

    def _start(self, environment: Mapping[str, str], *more: str) -> tuple[int, str]:
        begun = (self._run / "config.yaml").exists()
        temporary = self._directory / "tmp"
        temporary.mkdir(exist_ok=True)
        before = self._log.stat().st_size if self._log.exists() else 0
        variables = {**self._setting.environment, **environment, MARK: self._mark, "TMPDIR": str(temporary)}
        code = forked([*self._command, *more, *(["--resume"] if begun else [])], self._log, environment=variables)
        nothing_is_left(self._mark, temporary)
        return code, self._log.read_bytes()[before:].decode()


def of_an_engine(at: str) -> bool:
    """Whether a process dies there that generates and does nothing else."""
    return at.startswith("rollout-")


def _who(at: str) -> str:
    """As whom an error names the process that died there."""
    role, _, _ = at.rpartition("/")
    return "fork server" if role == "forkserver" else f"rank {role.rpartition('-')[2]} (process"


def came_to(run: Path) -> dict[str, Any]:
    """`outcome`, without what tells of the runtime (bytes that a publish moves) and of deaths."""
    found = outcome(run)
    for phase in ("metrics", "warmup"):
        found[phase] = [line for line in found[phase] if "run/restarts" not in line]
        for line in found[phase]:
            for name in ("publish/bytes", "queue/dropped/lost_policy", "queue/offered_again", "rollout/moved_requests"):
                line.pop(name, None)
    return found


def nothing_is_left(mark: str, temporary: Path) -> None:
    """No process that a run has started, whose memory would go with it, and no temporary file. Waits a little for the former."""
    until = time.monotonic() + _GONE_S
    while (left := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left, f"processes are left: {left}"
    files = [path for path in temporary.rglob("*") if path.is_file()]
    assert not files, f"temporary files are left: {files}"


def _marked(mark: str) -> dict[int, str]:
    """Processes that began with this mark in their environment, by their command lines."""
    wanted, found = f"{MARK}={mark}".encode(), dict[int, str]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
            except OSError:
                continue  # it has ended, or is another user's
    found.pop(os.getpid(), None)
    return found
