"""Named crash points: where a test may kill a process, to prove that nothing is lost there.

`TANDEM_CRASH_AT=snapshot.before_rename:2` sends SIGKILL to the process that passes that point the second time, and
`trainer-1/update.before_step:2` only where that is rank 1 of pool trainer. Roles: controller, POOL-RANK, reward, forkserver.
`TANDEM_CRASH_TRACE=FILE` has every process append a line `ROLE/POINT` for each point that it passes.
Several may be given, with spaces between. Every process of a name dies that passes its point so often; with
`TANDEM_CRASH_ONCE=DIRECTORY` only the first one, which leaves a file in that directory (`mark`), and nobody dies there again.
The variables are read when a process begins; a fork that changes them says so with `arm`.
"""

import os
import signal
from collections import Counter
from pathlib import Path

_passed: Counter[str] = Counter()
_role = "controller"
_trace = _once = ""
_wanted: list[str] = []


def arm() -> None:
    """Does from now on what the environment says."""
    global _trace, _once, _wanted
    _trace, _once = os.environ.get("TANDEM_CRASH_TRACE", ""), os.environ.get("TANDEM_CRASH_ONCE", "")
    _wanted = os.environ.get("TANDEM_CRASH_AT", "").split()


arm()


def take_role(name: str) -> None:
    """What this process is called from now on."""
    global _role
    _role = name


def crash_point(name: str) -> None:
    """Dies here by SIGKILL when the environment says so; otherwise does nothing."""
    if _trace:
        with open(_trace, "a") as file:  # one write: lines of several processes stay whole
            file.write(f"{_role}/{name}\n")
    for wanted in _wanted:
        point, _, times = wanted.partition(":")
        role, _, point = point.rpartition("/")
        if point != name or role not in ("", _role):
            continue
        _passed[wanted] += 1
        if _passed[wanted] == int(times or 1) and _is_first(wanted):
            os.kill(os.getpid(), signal.SIGKILL)


def mark(directory: Path, wanted: str) -> Path:
    """The file that says that a process died there."""
    return directory / wanted.replace("/", " ")


def _is_first(wanted: str) -> bool:
    """Whether nobody died there before, where that counts; whoever asks does now."""
    if _once:
        try:
            mark(Path(_once), wanted).touch(exist_ok=False)
        except FileExistsError:
            return False
    return True
