"""The learning curve of a run, as a PNG and as text: what it is trained on and held-out tasks, before and after.

Where the policy is rewarded these are rewards and pass rates, where it learns from a dataset losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from tandem.durable import attempt
from tandem.track.jsonl import Series

_TRAINING, _HELD_OUT, _LEVEL = "#9aa5b1", "#0b6e4f", "#c8553d"


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """training: mean of each training step. held_out: where it was measured. before, after: the held-out value of the model
    before the first and after the last step. of: rewards in training and pass@1, or losses.
    """

    title: str
    training: Series
    held_out: Series
    before: float
    after: float
    of: Literal["rewards", "losses"] = "rewards"

    @property
    def names(self) -> tuple[str, str]:
        return ("training reward", "held-out pass@1") if self.of == "rewards" else ("training loss", "held-out loss")

    def shown(self, level: float) -> str:
        return f"{level:.1%}" if self.of == "rewards" else f"{level:.4g}"


def smoothed(values: tuple[float, ...], window: int = 5) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    spans = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(span) / len(span) for span in spans]


def _limits(curve: LearningCurve, margin: float = 0.0) -> tuple[float, float]:
    """The vertical range, with this share of it on either side: rates lie in [0, 1], rewards and losses where they like."""
    values = (*curve.training.values, *curve.held_out.values, curve.before, curve.after)
    low, high = min(values), max(values)
    if curve.of == "rewards":
        low, high = min(0.0, low), max(1.0, high)
    room = margin * (high - low or 1.0)
    return low - room, high + room


def draw_png(curve: LearningCurve, path: Path) -> None:
    """Draws without pyplot, so that no display is asked for and no global figure is left behind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    training, held_out, (trained, measured) = curve.training, curve.held_out, curve.names
    axes.plot(training.steps, training.values, color=_TRAINING, alpha=0.45, linewidth=1)
    axes.plot(training.steps, smoothed(training.values), color=_TRAINING, linewidth=2, label=f"{trained} (mean of 5 steps)")
    axes.plot(held_out.steps, held_out.values, color=_HELD_OUT, linewidth=2.2, marker="o", markersize=5, label=measured)
    low, high = _limits(curve, 0.03)
    close = abs(curve.after - curve.before) < 0.06 * (high - low)
    for name, level, side in (("before", curve.before, "top"), ("after", curve.after, "bottom")):
        axes.axhline(level, color=_LEVEL, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"{name}\n{curve.shown(level)}",
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
    axes.set_ylabel("mean reward, pass rate" if curve.of == "rewards" else "loss")
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right" if curve.of == "rewards" else "upper right", frameon=False, fontsize=9)
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
    trained, measured = curve.names
    drawn = ((trained, curve.training, "·", "gray"), (measured, curve.held_out, "●", "green+"))
    figure.label("step    " + "   ".join(f"{symbol} {name}" for name, _, symbol, _ in drawn), "x")
    for _, series, symbol, shade in drawn:
        if series.steps:
            marker = plotext.marker(symbol, shade)
            figure.draw(figure.signal(list(series.steps), list(series.values), marker=marker))
    text = Text.from_ansi(str(figure.build()).rstrip(), no_wrap=True)
    figure.clear()
    return text
