"""Trackio, through its own client: a database on this machine (TRACKIO_DIR), or a space of a hub (TRACKIO_SPACE_ID)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import trackio  # pyright: ignore[reportMissingTypeStubs]

from tandem.track.hosted import HostedTracker, TrackedRun


class _Client:
    def __init__(self, run: TrackedRun, record: str, *, begun: bool) -> None:
        project = os.environ.get("TRACKIO_PROJECT", "tandem")
        name = f"{run.name}-{record}"  # it has no ids, and names are unique in a project
        how = "must" if begun else "never"
        self._run: Any = trackio.init(
            project, name, config=dict(run.config), resume=how, embed=False, auto_log_cpu=False, auto_log_gpu=False
        )

    def send(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def tracker(run: TrackedRun) -> HostedTracker:
    return HostedTracker(run, "trackio", _Client, repeats=False, refusals=(OSError, ValueError))
