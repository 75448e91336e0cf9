"""What every benchmark prints last: one line of JSON on stdout, a row a claim, that `python benchmarks` collects.

    {"benchmark": "train", "machine": "...", "rows": [{"case", "against", "ratio", "floor", "stretch", "pass"}]}

A ratio is how much better Tandem is than what it is held against, measured in the same run; `floor` is what it must reach and
`stretch` what it would reach at best. A row with a `limit` instead is a price, Tandem's by the other's, which is at
most that. `spread` is the lowest and highest ratio of the repeats. The tables before it go to stderr.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]


def row(case: str, against: str, ratios: Sequence[float], floor: float, stretch: float, **more: Any) -> dict[str, Any]:
    """One claim: the median of the ratios of all repeats. more: what else a reader wants to know, such as both times."""
    ratio = statistics.median(ratios)
    spread = [round(min(ratios), 3), round(max(ratios), 3)]
    judged = {"ratio": round(ratio, 3), "floor": floor, "stretch": stretch, "pass": ratio >= floor}
    return {"case": case, "against": against, **judged, "spread": spread, **more}


def within(case: str, against: str, ratios: Sequence[float], limit: float, **more: Any) -> dict[str, Any]:
    """One claim about a price: Tandem's by the other's, which is at most `limit`."""
    ratio = statistics.median(ratios)
    spread = [round(min(ratios), 3), round(max(ratios), 3)]
    judged = {"ratio": round(ratio, 3), "limit": limit, "pass": ratio <= limit}
    return {"case": case, "against": against, **judged, "spread": spread, **more}


def publish(benchmark: str, rows: Sequence[dict[str, Any]]) -> int:
    """Prints the rows; the exit code: 1 where one is below its floor or above its limit."""
    for each in rows:
        print(f"{'ok  ' if each['pass'] else 'MISS'} {each}", file=sys.stderr)
    print(json.dumps({"benchmark": benchmark, "machine": machine(), "rows": rows}), flush=True)
    return 0 if all(each["pass"] for each in rows) else 1


def machine() -> str:
    """Processor, cores and versions, in words."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def cpu_seconds(call: Call) -> float:
    """Of this process."""
    began = time.process_time()
    call()
    return time.process_time() - began


def interleaved(peer: Call, ours: Call, repeats: int, *, warmup: int = 1) -> tuple[list[float], float, float]:
    """(peer / ours of each repeat, the peer's median CPU seconds, ours): the two take turns."""
    for _ in range(warmup):
        peer(), ours()
    times = [(cpu_seconds(peer), cpu_seconds(ours)) for _ in range(repeats)]
    theirs, mine = zip(*times, strict=True)
    return [a / b for a, b in times], statistics.median(theirs), statistics.median(mine)
