from __future__ import annotations

import io

import pytest
from rich.console import Console

from tandem.track import console as ours
from tandem.track.console import ConsoleTracker, Field
from tandem.types import Metrics

FIELDS = [
    Field("reward/mean", "reward {:.2f}"),
    Field("eval/pass@1", "held-out {:.2f}"),
    Field("tokens_per_s", "{:,.0f} tokens/s"),
]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(console: Console, clock: Clock, steps: int = 12, *, restored: int = 0) -> None:
    tracker = ConsoleTracker("GRPO [1]", steps, FIELDS, console=console, clock=clock)
    if restored:
        tracker.restore({"step": restored})
    for step in range(restored + 1, steps + 1):
        clock.now += 2
        metrics = Metrics.mean({"reward/mean": step / 16, "tokens_per_s": 3412.4, "not shown": 1.0})
        if step % 3 == 0:
            metrics += Metrics.mean({"eval/pass@1": step / 20})
        tracker.log(metrics, step)
    tracker.close()
    tracker.close()


def test_plain_lines_without_a_terminal() -> None:
    file = io.StringIO()
    run(Console(file=file, width=40), Clock())
    assert file.getvalue().splitlines() == [
        "GRPO [1] 1/12  reward 0.06  3,412 tokens/s  ? left",
        "GRPO [1] 4/12  reward 0.25  held-out 0.15 (step 3)  3,412 tokens/s  0:16 left",
        "GRPO [1] 7/12  reward 0.44  held-out 0.30 (step 6)  3,412 tokens/s  0:10 left",
        "GRPO [1] 10/12  reward 0.62  held-out 0.45 (step 9)  3,412 tokens/s  0:04 left",
        "GRPO [1] 12/12  reward 0.75  held-out 0.60  3,412 tokens/s  0:00 left",
    ]


def test_the_last_line_comes_once_and_with_what_was_measured_at_the_end() -> None:
    file = io.StringIO()
    tracker = ConsoleTracker("GRPO", 2, FIELDS, console=Console(file=file, width=40), plain_every_s=0.0)
    for step, metrics in ((1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5}), (2, {"eval/pass@1": 0.75})):
        tracker.log(Metrics.mean(metrics), step)
    tracker.close()
    first, last = file.getvalue().splitlines()
    assert first.startswith("GRPO 1/2  reward 0.25")
    assert last.startswith("GRPO 2/2  reward 0.50  held-out 0.75")


@pytest.mark.parametrize("variable", ["TERM", "none"])
def test_no_control_characters_where_they_are_not_understood(variable: str) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=variable == "TERM", _environ={"TERM": "dumb"})
    run(console, Clock())
    assert file.getvalue().count("\n") == 5
    assert file.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize("width", [80, 120])
def test_a_live_line_in_a_terminal(width: int) -> None:
    file = io.StringIO()
    run(Console(file=file, force_terminal=True, width=width, _environ={"TERM": "xterm"}), Clock())
    text = file.getvalue()
    assert "\x1b" in text
    last_frame = text.rsplit("\r", 1)[-1]
    assert "12/12  0:00 left  reward 0.75  held-out 0.60  3,412 tokens/s" in last_frame
    assert "GRPO [1] " in last_frame
    assert text.endswith("\x1b[?25h")  # the cursor is shown again


def test_the_time_left_stays_where_a_terminal_is_too_narrow_for_a_live_line() -> None:
    file = io.StringIO()
    run(Console(file=file, force_terminal=True, width=60, _environ={"TERM": "xterm"}), Clock(), steps=11)
    last_frame = file.getvalue().rsplit("\r", 1)[-1]
    assert "11/11  0:00 left" in last_frame
    assert "tokens/s" not in last_frame


def test_a_line_of_a_log_is_wrapped_by_nobody() -> None:
    file, words = io.StringIO(), "warning: " + "word " * 40 + "end"
    ours.Console(file=file).print(words, style="yellow")
    assert file.getvalue() == f"{words}\n"


def times_left(lines: str) -> list[str]:
    return [line.split("  ")[-1] for line in lines.splitlines()]


def test_time_left_counts_from_where_the_run_was_resumed() -> None:
    file = io.StringIO()
    clock = Clock()
    tracker = ConsoleTracker("GRPO", 3603, [], console=Console(file=file), clock=clock, plain_every_s=0.0)
    tracker.restore({"step": 1})
    for step in (2, 3):
        clock.now += 10
        tracker.log(Metrics(), step)
    assert times_left(file.getvalue()) == ["? left", "10:00:00 left"]


def test_time_left_is_told_from_the_second_step_on_by_steps_alone() -> None:
    """What is measured and made ready before and in the first step comes once; what is measured between steps comes again."""
    file = io.StringIO()
    clock = Clock()
    tracker = ConsoleTracker("GRPO", 5, [], console=Console(file=file), clock=clock, plain_every_s=0.0)
    for took_s, step in ((300, 0), (60, 1), (10, 2), (40, 2), (10, 3), (10, 4), (10, 5)):
        clock.now += took_s
        tracker.log(Metrics(), step)
    tracker.close()
    assert times_left(file.getvalue()) == ["? left", "? left", "0:30 left", "0:30 left", "1:00 left", "0:23 left", "0:00 left"]


def test_a_run_of_one_step_has_nothing_left() -> None:
    file = io.StringIO()
    tracker = ConsoleTracker("GRPO", 1, [], console=Console(file=file), clock=Clock())
    tracker.log(Metrics(), 1)
    tracker.close()
    assert times_left(file.getvalue()) == ["0:00 left"]
