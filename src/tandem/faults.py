"""Named crash points: where a test may kill the process, to prove that nothing is lost there.

`TANDEM_CRASH_AT=snapshot.before_rename:2` sends SIGKILL to this process the second time it passes that point.
Without the variable a point costs one dictionary look-up.
"""

import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Dies here by SIGKILL when the environment says so; otherwise does nothing."""
    wanted = os.environ.get("TANDEM_CRASH_AT")
    if wanted is None:
        return
    point, _, times = wanted.partition(":")
    if point != name:
        return
    _passed[name] += 1
    if _passed[name] == int(times or 1):
        os.kill(os.getpid(), signal.SIGKILL)
