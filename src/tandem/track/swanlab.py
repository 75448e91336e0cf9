"""SwanLab, through its own client: its cloud, or files below the run's directory with SWANLAB_MODE=offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import swanlab  # pyright: ignore[reportMissingTypeStubs]

from tandem.track.hosted import HostedTracker, TrackedRun


class _Client:
    def __init__(self, run: TrackedRun, record: str, *, begun: bool) -> None:
        del begun  # "allow" is right for both
        self._run: Any = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", "tandem"),
            log_dir=str(run.directory / "swanlab"),
            id=record,
            name=run.name,
            resume="allow",
            config=dict(run.config),
        )

    def send(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def tracker(run: TrackedRun) -> HostedTracker:
    return HostedTracker(run, "swanlab", _Client, repeats=True, refusals=(RuntimeError, ValueError))
