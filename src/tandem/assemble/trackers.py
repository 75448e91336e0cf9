"""Where the metrics of a phase go."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console

from tandem.assemble.phases import Phase
from tandem.config import flatten
from tandem.errors import ConfigError
from tandem.ports import Tracker
from tandem.recipe import Recipe
from tandem.registry import resolve
from tandem.track.console import ConsoleTracker, Field
from tandem.track.fan_out import Trackers
from tandem.track.hosted import TrackedRun
from tandem.track.jsonl import JsonlTracker
from tandem.track.trace import TraceTracker
from tandem.trainer.source import RolloutSource
from tandem.types import Json

MakeTracker = Callable[[TrackedRun], Tracker]

TRACKERS = {
    "tensorboard": "tandem.track.tensorboard:TensorBoardTracker.of",
    "wandb": "tandem.track.wandb:tracker",
    "mlflow": "tandem.track.mlflow:tracker",
    "swanlab": "tandem.track.swanlab:tracker",
    "trackio": "tandem.track.trackio:tracker",
}
_CONSOLE = "console"


def find_trackers(names: Sequence[str]) -> dict[str, MakeTracker]:
    """What makes the trackers of these names, those of the console left out.

    Raises RegistryError for an unknown name or a missing extra, ConfigError for what makes no tracker.
    """
    known = {_CONSOLE: "", **TRACKERS}
    found = {name: resolve(name, known, kind="tracker") for name in names if name != _CONSOLE}
    for name, make in found.items():
        if not callable(make) or not _takes_one(make):
            raise ConfigError(f"logs names {name}, which is no function that takes a TrackedRun and makes a tracker")
    return cast("dict[str, MakeTracker]", found)


def _takes_one(make: Callable[..., object]) -> bool:
    try:
        inspect.signature(make).bind(None)
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        return True
    return True


def build_trackers(recipe: Recipe, phase: Phase, directory: Path, console: Console) -> Trackers:
    """The trackers of `recipe.logs`; a phase has a directory of its own, and a record of its own elsewhere."""
    title = phase.algorithm.name.upper() if phase.name == "train" else phase.name
    fields = (
        Field("train/loss", "loss {:.3f}"),
        Field("reward/mean", "reward {:.2f}"),
        Field("eval/pass@1", "held-out {:.2f}"),
        Field("eval/loss", "held-out loss {:.3f}"),
        Field("train/preference_accuracy", "accuracy {:.2f}"),
        Field("rollout/dropped_reward_failed", "failed rewards {:.0f}"),
        Field("time/tokens_per_s", "{:,.0f} tokens/s"),
    )
    name = recipe.run.directory.name if phase.name == "train" else f"{recipe.run.directory.name}-{phase.name}"
    values: dict[str, Json] = json.loads(json.dumps(dict(flatten(recipe)), default=str))
    run = TrackedRun(directory, name, values)
    source = phase.source
    spans = (lambda: source.spans) if isinstance(source, RolloutSource) else tuple
    members: dict[str, Tracker] = {
        "jsonl": JsonlTracker(directory / "metrics.jsonl"),
        "trace": TraceTracker(directory / "trace.json", spans),
    }
    if _CONSOLE in recipe.logs:
        members[_CONSOLE] = ConsoleTracker(title, phase.steps, fields, console=console)
    return Trackers(members | {name: make(run) for name, make in find_trackers(recipe.logs).items()})
