"""Where the metrics of a phase go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tandem.assemble.phases import Phase
from tandem.ports import Tracker
from tandem.recipe import Log, Recipe
from tandem.track.console import ConsoleTracker, Field
from tandem.track.fan_out import Trackers
from tandem.track.jsonl import JsonlTracker
from tandem.track.tensorboard import TensorBoardTracker


def build_trackers(recipe: Recipe, phase: Phase, directory: Path, console: Console) -> Trackers:
    """The trackers of `recipe.logs`; a phase has a directory of its own."""
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
    made: dict[Log, Callable[[], Tracker]] = {
        "console": lambda: ConsoleTracker(title, phase.steps, fields, console=console),
        "tensorboard": lambda: TensorBoardTracker(directory / "tensorboard"),
    }
    return Trackers({"jsonl": JsonlTracker(directory / "metrics.jsonl"), **{name: made[name]() for name in recipe.logs}})
