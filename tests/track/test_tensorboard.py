from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FULL_DISK = """
import resource, signal, sys, threading
from pathlib import Path
from tandem.errors import SnapshotError
from tandem.track.tensorboard import TensorBoardTracker
from tandem.types import Metrics

tracker = TensorBoardTracker(Path(sys.argv[1]))
tracker.log(Metrics.mean({"loss": 1.0}), 0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
for action in (lambda: [tracker.log(Metrics.mean({"loss": 1.0}), step) for step in range(100)], tracker.close):
    try:
        action()
    except SnapshotError as error:
        print(error)
for thread in threading.enumerate():  # the writer's own, which prints its traceback while the interpreter would end
    if thread is not threading.main_thread():
        thread.join(10)
"""


def test_a_full_disk_is_said_in_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"cannot write TensorBoard events in {tmp_path}: File too large; ") == 2
