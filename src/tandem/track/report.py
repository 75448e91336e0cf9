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
from tandem.track.summary import Summary

_NAMES = {"pass@1": "pass@1, sampled", "greedy": "pass@1, greedy"}


def final_report(
    console: Console,
    summary: Summary,
    curve: LearningCurve,
    samples: Sequence[SampleRecord],
    places: Mapping[str, Path],
    next_command: str,
) -> None:
    """Prints the report. samples: held-out ones, of which the first three are shown. places: what -> where it lies."""
    console.print()
    console.print(before_after(summary))
    console.print()
    for sample in samples[:3]:
        console.print(shown(sample), soft_wrap=True)
    console.print()
    console.print(draw_text(curve, width=min(console.width, 100)))
    console.print()
    for what, where in places.items():
        console.print(f"{escape(what):<16} [bold]{escape(str(where))}[/bold]", soft_wrap=True, highlight=False)
    console.print(f"{'try next':<16} [bold green]{escape(next_command)}[/bold green]", soft_wrap=True, highlight=False)


def before_after(summary: Summary) -> Table:
    """A row for each number that was measured both times; green and red where one of two ways is the better one."""
    before, after = summary.eval_before, summary.eval_after
    minutes, seconds = divmod(round(summary.wall_s), 60)
    table = Table(
        title=f"{after['n']:,.0f} held-out tasks, {summary.steps} steps, {minutes}:{seconds:02d} min", title_justify="left"
    )
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name in before:
        if name == "failed" and before[name] + after.get(name, 0):
            table.add_row("not judged, left out", f"{before[name]:.0f}", f"{after.get(name, 0):.0f}", "")
        elif name in after and name not in ("n", "failed"):
            rate = name.startswith(("pass@", "greedy", "preference_accuracy"))
            change = after[name] - before[name]
            better = 0.0 if not rate and name != "loss" else change if rate else -change
            style = "green" if better > 0 else "red" if better < 0 else ""
            shown = [f"{value:.1%}" if rate else f"{value:.4g}" for value in (before[name], after[name])]
            table.add_row(_NAMES.get(name, name), *shown, Text(f"{100 * change:+.1f} pts" if rate else f"{change:+.4g}", style))
    return table


def shown(sample: SampleRecord) -> Text:
    """A task, what the policy made of it, and the reward."""
    value = sample.reward
    mark, style = ("?", "yellow") if value is None else ("✓", "green") if value > 0 else ("✗", "red")
    text = Text.assemble((f"{mark} ", style), (_one_line(sample.prompt), "dim"))
    text.append(f"\n  → {_one_line(sample.text)}")
    reward = "none" if value is None else f"{value:g}"
    return text.append(f"   (reward {reward}, {sample.stop})", "dim")


def _one_line(text: str, width: int = 240) -> str:
    line = text.replace("\n", " ⏎ ")
    return line if len(line) <= width else f"{line[: width - 1]}…"
