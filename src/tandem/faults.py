"""Named crash points: where a test may kill a process, to prove that nothing is lost there.

`TANDEM_CRASH_AT=snapshot.before_rename:2` sends SIGKILL to the process that passes that point the second time, and
`trainer-1/update.before_step:2` only where that is rank 1 of pool trainer. Roles: controller, POOL-RANK, reward, forkserver.
`TANDEM_CRASH_TRACE=FILE` has every process append a line `ROLE/POINT` for each point that it passes.
The variables are read when a process begins; a fork that changes them says so with `arm`.
"""

import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()
_role = "controller"
_trace = _wanted = ""


def arm() -> None:
    """Does from now on what the environment says."""
    global _trace, _wanted
    _trace, _wanted = os.environ.get("TANDEM_CRASH_TRACE", ""), os.environ.get("TANDEM_CRASH_AT", "")


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
    if not _wanted:
        return
    point, _, times = _wanted.partition(":")
    role, _, point = point.rpartition("/")
    if point != name or role not in ("", _role):
        return
    _passed[name] += 1
    if _passed[name] == int(times or 1):
        os.kill(os.getpid(), signal.SIGKILL)
