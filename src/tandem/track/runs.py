"""Runs as their directories tell of them, while they go on and afterwards. It reads files, and imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.config import read
from tandem.durable import records
from tandem.errors import ConfigError, SnapshotError, TandemError
from tandem.track.curve import LearningCurve, draw_text
from tandem.track.jsonl import Series, series_of
from tandem.track.report import before_after, shown
from tandem.track.samples import SampleRecord, read_samples
from tandem.track.summary import Summary, read_summary
from tandem.types import Json

State = Literal["running", "finished", "failed", "stopped"]
FAILURE = "error.txt"  # in the directory of a run that failed: why
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH, _NARROW = 24, 8  # characters of a sparkline: in 100 columns and more, and in a table that fits into 80
_SHOWN = (
    "reward/mean",
    "train/entropy",
    "train/grad_norm",
    "rollout/length",
    "mismatch/max",
    "staleness/mean",
    "time/step_s",
    "time/tokens_per_s",
)


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run. lines: of metrics.jsonl. summary: None until it has made all of its steps. state: "stopped" where it
    was interrupted or killed. error: why it failed, if it did.
    """

    directory: Path
    config: Mapping[str, Any]
    lines: Sequence[Mapping[str, Json]]
    summary: Summary | None
    state: State
    error: str = ""

    @property
    def algorithm(self) -> str:
        return str(self._value("algorithm", "name"))

    @property
    def seed(self) -> int:
        return int(self._value("seed"))

    @property
    def steps(self) -> int:
        return int(self._value("trainer", "steps"))

    @property
    def solved(self) -> float:
        """The reward from which an episode passes."""
        return float(self._value("evaluation", "solved"))

    @property
    def steps_done(self) -> int:
        return max((step for line in self.lines if isinstance(step := line["step"], int)), default=0)

    @property
    def curve(self) -> LearningCurve | None:
        """None before anything was measured."""
        of = "rewards" if any("reward/mean" in line for line in self.lines) else "losses"
        trained, measured = ("reward/mean", "pass@1") if of == "rewards" else ("train/loss", "loss")
        training, held_out = series_of(self.lines, trained), series_of(self.lines, f"eval/{measured}")
        known = held_out.values or training.values
        if not known:
            return None
        before, after = known[0], known[-1]
        if self.summary is not None and measured in self.summary.eval_after:
            before, after = self.summary.eval_before[measured], self.summary.eval_after[measured]
        title = f"{self.directory.name}: {self.algorithm}, seed {self.seed}"
        return LearningCurve(title, training, held_out, before, after, of)

    def _value(self, *path: str) -> Any:
        value: Any = self.config
        for name in path:
            value = cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None
        if value is None:
            raise ConfigError(f"{self.directory / 'config.yaml'} does not say {'.'.join(path)}: is it that of a run?")
        return value


def config_of(directory: Path) -> Path:
    """Of a run, every value of its recipe. Raises ConfigError for a directory that is none of a run."""
    if not directory.is_dir():
        raise ConfigError(
            f"there is no run {directory}: give the directory of one, such as runs/quickstart; `tandem runs` lists them"
        )
    if not (config := directory / "config.yaml").is_file():
        raise ConfigError(f"{directory} is not the directory of a run: it has no config.yaml")
    return config


def read_run(directory: Path) -> RunRecord:
    """Raises ConfigError for a directory that is none of a run, SnapshotError for a damaged file."""
    config = config_of(directory)
    metrics, summary = directory / "metrics.jsonl", read_summary(directory / "summary.json")
    error = failure.read_text(encoding="utf-8") if (failure := directory / FAILURE).is_file() else ""
    lines = tuple(records(metrics)) if metrics.is_file() else ()
    if other := next((number for number, line in enumerate(lines, start=1) if type(line.get("step")) is not int), None):
        raise SnapshotError(f"{metrics}, line {other} has no step, as a line of a run has: is it of something else?")
    run = RunRecord(directory, read(config), lines, summary, "stopped", error.strip())
    if summary is not None and summary.steps < run.steps:  # of an end from which it went on
        run = replace(run, summary=None)
    ended: State = "failed" if error else "finished" if run.summary is not None else "stopped"
    return replace(run, state="running" if in_use(directory) else ended)


def find_runs(place: Path) -> list[Path]:
    """The directories of runs below this one, by name, of one that has just begun, too; a run's own phases are not runs."""
    if not place.is_dir():
        raise ConfigError(f"there is no directory {place}: runs are in runs/ below the directory that they were begun in")
    found: list[Path] = []
    for directory, names, files in os.walk(place):
        run = Path(directory)
        if "config.yaml" in files and ("metrics.jsonl" in files or "warmup" in names or in_use(run)):
            found.append(run)
            names.clear()
    return sorted(found)


def table_of(places: Sequence[Path]) -> Table:
    """A line a run: where it stands, its held-out value before and now, and how its training went."""
    table = Table(collapse_padding=True)  # so that runs/quickstart is whole in 80 columns
    table.add_column("run", overflow="fold")
    for heading, width in (("algorithm", 4), ("seed", 4), ("state", len("finished"))):
        table.add_column(heading, overflow="fold", min_width=width)
    for heading in ("steps", "before", "now"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("training", no_wrap=True)
    for place in places:
        try:
            run = read_run(place)
            curve = run.curve
            levels = (curve.shown(curve.before), curve.shown(curve.after)) if curve else ("", "")
            steps = f"{run.steps_done}/{run.steps}"
            style = {"running": "yellow", "finished": "green", "failed": "red", "stopped": "magenta"}[run.state]
            told = (
                run.algorithm,
                str(run.seed),
                f"[{style}]{run.state}[/]",
                steps,
                *levels,
                sparkline(curve.training, _NARROW) if curve else "",
            )
        except TandemError as problem:
            told = ("", "", f"[red]{escape(str(problem))}[/]")
        table.add_row(escape(str(place)), *told)
    return table


def sparkline(series: Series, width: int) -> str:
    """The values as bars from the lowest to the highest, each the mean of its share of the steps."""
    values = series.values
    if not values:
        return ""
    num = min(width, len(values))
    cuts = [round(i * len(values) / num) for i in range(num + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] if span else _BARS[0] for mean in means)


def show(run: RunRecord, console: Console, *, samples: int, metrics: Sequence[str]) -> None:
    """Its state, what was measured, its curve, how the named metrics went, and the last samples that it was trained on.

    Raises ConfigError for a metric that no line has.
    """
    known = {name for line in run.lines for name in line}
    if unknown := [name for name in metrics if name not in known]:
        raise ConfigError(f"no step of {run.directory} logged {unknown[0]}; known: {', '.join(sorted(known - {'step', 'time'}))}")
    console.print(f"{run.directory}: {run.algorithm}, {run.state}, {run.steps_done} of {run.steps} steps", markup=False)
    if run.error:
        console.print(run.error, style="red", markup=False, highlight=False, soft_wrap=True)
    if run.summary is not None and run.summary.eval_after:
        console.print(before_after(run.summary))
    if run.curve is not None:
        console.print(draw_text(run.curve, width=min(console.width, 100)))
    table = Table()
    table.add_column("metric", overflow="fold")
    for heading in ("first", "last", "lowest", "highest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("steps", no_wrap=True)
    wide = _WIDTH if console.width >= 100 else _NARROW
    for name in metrics or [name for name in _SHOWN if name in known]:
        series = series_of(run.lines, name)
        if values := series.values:
            ends = (values[0], values[-1], min(values), max(values))
            table.add_row(name, *(f"{value:.4g}" for value in ends), sparkline(series, wide))
    if table.row_count:
        console.print(table)
    for sample in last_samples(run.directory, samples):
        console.print(shown(sample, run.solved), soft_wrap=True)


def last_samples(directory: Path, num: int) -> list[SampleRecord]:
    """Some of the last step that was trained on, those with the best and the worst reward among them."""
    path = directory / "samples.jsonl"
    found = list(read_samples(path)) if path.is_file() and num else []
    last = [sample for step, sample in found if step == found[-1][0]]
    last.sort(key=lambda sample: (sample.reward is None, -(sample.reward or 0.0)))
    best = (num + 1) // 2
    return last if len(last) <= num else [*last[:best], *last[len(last) - (num - best) :]]


def in_use(directory: Path) -> bool:
    """Whether a process has the directory's lock, as one that trains has; to try it would be in the way of one that begins."""
    inode = f":{directory.stat().st_ino}"
    lines = (line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())
    return any(fields[1] == "FLOCK" and fields[5].endswith(inode) for fields in lines)
