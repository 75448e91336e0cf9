"""From the start of `tandem train recipes/quickstart.yaml` to its first optimiser step, against `import torch` and two seconds.

    python benchmarks/startup.py     # the last line is JSON; exits with 1 where the ratio is below its floor

CPU seconds of the process and what it starts, on one thread, with warm caches; the two take turns. The run ends itself by SIGKILL
after its first optimiser step (TANDEM_CRASH_AT), so that nothing that comes later is counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lines import publish, row

ALLOWED_S, FLOOR, STRETCH = 2.0, 1.0, 1.3
RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"


def seconds(command: list[str], **more: str) -> tuple[float, float]:
    """(CPU, wall) seconds of a command and what it starts, to its end."""
    began_s, before = time.perf_counter(), os.times()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | more
    subprocess.run([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL, check=False)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return spent, time.perf_counter() - began_s


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=5)
    repeats = arguments.parse_args().repeats
    ours, theirs = list[tuple[float, float]](), list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as directory:
        started = "from tandem.cli import main; main()"
        for number in range(-1, repeats):  # the first warms the caches up
            train = ["-c", started, "train", str(RECIPE), f"run.dir={directory}/{number}"]
            pair = seconds(["-c", "import torch"]), seconds(train, TANDEM_CRASH_AT="update.after_step")
            if number >= 0:
                theirs.append(pair[0])
                ours.append(pair[1])
    ratios = [(peer + ALLOWED_S) / mine for (peer, _), (mine, _) in zip(theirs, ours, strict=True)]
    medians = {
        f"{name}_{clock}_s": round(statistics.median(times[i] for times in found), 2)
        for name, found in (("torch", theirs), ("tandem", ours))
        for i, clock in enumerate(("cpu", "wall"))
    }
    case = "quickstart to its first optimiser step"
    return publish("startup", [row(case, f"import torch and {ALLOWED_S:g} s", ratios, FLOOR, STRETCH, **medians)])


if __name__ == "__main__":
    sys.exit(main())
