"""Weights & Biases, through its own client: an account's project, or files below the run's directory with WANDB_MODE=offline.

The project is "tandem"; that one and the rest are the client's environment variables (WANDB_PROJECT, WANDB_ENTITY, ...).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import wandb  # pyright: ignore[reportMissingTypeStubs]
from wandb.errors import Error  # pyright: ignore[reportMissingTypeStubs]

from tandem.track.hosted import HostedTracker, TrackedRun


class _Client:
    def __init__(self, run: TrackedRun, record: str, *, begun: bool) -> None:
        del begun  # "allow" is right for both
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tandem"),
            dir=str(run.directory),
            id=record,
            name=run.name,
            resume="allow",
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def send(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def tracker(run: TrackedRun) -> HostedTracker:
    return HostedTracker(run, "wandb", _Client, repeats=True, refusals=(Error,))
