"""What a run says at its end: before and after, three completions, the learning curve, where things are, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tandem.track.curve import LearningCurve, draw_text
from tandem.track.samples import SampleRecord
from tandem.track.summary import TRAINING_LIMIT, Summary

_NAMES = {
    "pass@1": "pass@1, sampled",
    "greedy": "pass@1, greedy",
    "reward": "mean reward",
    "cut_off": "cut off",
    "failed": "not judged, left out",
}
_CUT = f"{TRAINING_LIMIT}/"
_CONDITIONS = {"n": "held-out tasks", "max_tokens": "tokens at most"}


def final_report(
    console: Console,
    summary: Summary,
    curve: LearningCurve,
    samples: Sequence[SampleRecord],
    places: Mapping[str, Path],
    next_command: str,
    *,
    solved: float,
) -> None:
    """Prints the report. samples: held-out ones, of which the first three are shown. places: what -> where it lies. solved: as
    `shown` takes it.
    """
    console.print()
    console.print(before_after(summary))
    console.print()
    for sample in samples[:3]:
        console.print(shown(sample, solved), soft_wrap=True)
    console.print()
    console.print(draw_text(curve, width=min(console.width, 100)))
    console.print()
    for what, where in places.items():
        console.print(f"{escape(what):<16} [bold]{escape(str(where))}[/bold]", soft_wrap=True, highlight=False)
    console.print(f"{'try next':<16} [bold green]{escape(next_command)}[/bold green]", soft_wrap=True, highlight=False)


def before_after(summary: Summary) -> Table:
    """A row for each number that was measured both times; green and red where one of two ways is the better one. Where what was
    measured was not the same both times, as after --resume with another limit, it says so.
    """
    before, after = summary.eval_before, summary.eval_after
    minutes, seconds = divmod(round(summary.wall_s), 60)
    table = Table(
        title=f"{after['n']:,.0f} held-out tasks, {summary.steps} steps, {minutes}:{seconds:02d} min", title_justify="left"
    )
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    limits = any(name.startswith(_CUT) for name in before)  # where there are two limits, each says what it cuts off
    unlike: list[str] = []
    for name in before:
        kind = name.removeprefix(_CUT)
        of = ", limit of training" if kind != name else ""
        label = _NAMES.get(kind, kind) + of
        if kind == "failed" and before[name] + after.get(name, 0):
            table.add_row(label, f"{before[name]:.0f}", f"{after.get(name, 0):.0f}", "")
        elif kind in _CONDITIONS:
            if after.get(name, before[name]) != before[name]:
                unlike.append(f"{before[name]:.0f} {_CONDITIONS[kind]}{of} before, {after[name]:.0f} after")
        elif name in after and kind != "failed" and (limits or kind != "cut_off"):
            rate = kind.startswith(("pass@", "greedy", "preference_accuracy", "cut_off"))
            change = after[name] - before[name]
            better = -change if kind in ("loss", "cut_off") else change if rate else 0.0
            style = "green" if better > 0 else "red" if better < 0 else ""
            shown = [f"{value:.1%}" if rate else f"{value:.4g}" for value in (before[name], after[name])]
            table.add_row(label, *shown, Text(f"{100 * change:+.1f} pts" if rate else f"{change:+.4g}", style))
    if unlike:
        table.caption = Text(f"before and after do not compare: {'; '.join(unlike)}", "yellow")
    return table


def shown(sample: SampleRecord, solved: float) -> Text:
    """A task, what the policy made of it, and the reward. solved: the reward from which it counts as passed."""
    value = sample.reward
    mark, style = ("?", "yellow") if value is None else ("✓", "green") if value >= solved else ("✗", "red")
    text = Text.assemble((f"{mark} ", style), (_one_line(sample.prompt), "dim"))
    text.append(f"\n  → {_one_line(sample.text)}")
    reward = "none" if value is None else f"{value:g}"
    return text.append(f"   (reward {reward}, {sample.stop})", "dim")


def _one_line(text: str, width: int = 240) -> str:
    line = text.replace("\n", " ⏎ ")
    return line if len(line) <= width else f"{line[: width - 1]}…"
