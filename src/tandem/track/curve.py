"""The learning curve of a run, as a PNG and as text: reward in training, pass rate on held-out tasks, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from tandem.durable import attempt
from tandem.track.jsonl import Series

_REWARD, _HELD_OUT, _LEVEL = "#9aa5b1", "#0b6e4f", "#c8553d"


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """reward: mean of each training step. held_out: pass@1 where it was measured. before, after: pass@1 of the model
    before the first and after the last step.
    """

    title: str
    reward: Series
    held_out: Series
    before: float
    after: float


def smoothed(values: tuple[float, ...], window: int = 5) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    spans = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(span) / len(span) for span in spans]


def _limits(curve: LearningCurve, margin: float = 0.0) -> tuple[float, float]:
    """The vertical range: rates lie in [0, 1], rewards where they like."""
    values = (*curve.reward.values, *curve.held_out.values, curve.before, curve.after)
    return min(0.0, *values) - margin, max(1.0, *values) + margin


def draw_png(curve: LearningCurve, path: Path) -> None:
    """Draws without pyplot, so that no display is asked for and no global figure is left behind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    reward, held_out = curve.reward, curve.held_out
    axes.plot(reward.steps, reward.values, color=_REWARD, alpha=0.45, linewidth=1)
    axes.plot(reward.steps, smoothed(reward.values), color=_REWARD, linewidth=2, label="training reward (mean of 5 steps)")
    axes.plot(held_out.steps, held_out.values, color=_HELD_OUT, linewidth=2.2, marker="o", markersize=5, label="held-out pass@1")
    close = abs(curve.after - curve.before) < 0.06
    for name, level, side in (("before", curve.before, "top"), ("after", curve.after, "bottom")):
        axes.axhline(level, color=_LEVEL, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"{name}\n{level:.1%}",
            xy=(1, level),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va=side if close else "center",
            color=_LEVEL,
            fontsize=9,
        )
    axes.set_title(curve.title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward, pass rate")
    axes.set_ylim(*_limits(curve, 0.03))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    with attempt(f"write {path}", path):
        figure.savefig(path)


def draw_text(curve: LearningCurve, width: int = 80, height: int = 16) -> Text:
    """The same for a terminal, `width` columns by `height` rows."""
    import plotext  # pyright: ignore[reportMissingTypeStubs]

    figure: Any = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.theme("colorless")
    figure.title(curve.title)
    low, high = _limits(curve)
    figure.ruler("y").lim(low, high)
    drawn = (("training reward", curve.reward, "·", "gray"), ("held-out pass@1", curve.held_out, "●", "green+"))
    figure.label("step    " + "   ".join(f"{symbol} {name}" for name, _, symbol, _ in drawn), "x")
    for _, series, symbol, shade in drawn:
        if series.steps:
            marker = plotext.marker(symbol, shade)
            figure.draw(figure.signal(list(series.steps), list(series.values), marker=marker))
    text = Text.from_ansi(str(figure.build()).rstrip(), no_wrap=True)
    figure.clear()
    return text
