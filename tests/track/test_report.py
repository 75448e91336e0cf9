from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tandem.errors import ColumnError, SnapshotError
from tandem.track.curve import LearningCurve, draw_png, draw_text, smoothed
from tandem.track.fake import ListTracker
from tandem.track.fan_out import Trackers
from tandem.track.jsonl import JsonlTracker, Series, read_series
from tandem.track.report import before_after, final_report
from tandem.track.samples import SampleRecord
from tandem.track.summary import Summary, read_summary, write_summary
from tandem.types import Metric, Metrics, RewardResult
from tests.track.episodes import episode

SUMMARY = Summary(
    eval_before={"pass@1": 0.3125, "greedy": 0.5, "pass@4": 0.75, "n": 512},
    eval_after={"pass@1": 0.96, "greedy": 0.4, "pass@4": 0.75, "pass@8": 1.0, "n": 512},
    steps=60,
    wall_s=71.23456,
    facts={"seed": 7},
)
CURVE = LearningCurve(
    "quickstart: GRPO on calculator",
    training=Series(tuple(range(1, 31)), tuple(step / 40 for step in range(30))),
    held_out=Series((0, 10, 20, 30), (0.3125, 0.5, 0.75, 0.96)),
    before=0.3125,
    after=0.96,
)
EMPTY = LearningCurve("nothing yet", Series(), Series(), 0.5, 0.5)


def test_summary_is_one_json_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, SUMMARY)
    body = json.loads(path.read_text(encoding="utf-8"))
    assert list(body) == ["seed", "eval_before", "eval_after", "steps", "wall_s"]
    assert (body["eval_after"], body["steps"], body["wall_s"], body["seed"]) == (SUMMARY.eval_after, 60, 71.235, 7)
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]


def test_a_series_is_read_back_and_holes_are_left_out(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", clock=lambda: 12.3456)
    tracker.log(Metrics.mean({"eval/pass@1": 0.25}), 0)
    tracker.log(Metrics.mean({"loss": 1.0}), 1)
    tracker.log(Metrics({"eval/pass@1": Metric(0, 0)}), 2)
    tracker.log(Metrics.mean({"eval/pass@1": 1.0}), 3)
    with pytest.raises(ColumnError, match="cannot be called step"):
        tracker.log(Metrics.mean({"step": 1.0}), 4)
    tracker.close()
    assert read_series(tmp_path / "metrics.jsonl", "eval/pass@1") == Series((0, 3), (0.25, 1.0))
    first = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert first == '{"step": 0, "time": 12.346, "eval/pass@1": 0.25}'


def test_every_tracker_is_closed_even_if_one_fails() -> None:
    class Broken(ListTracker):
        def close(self) -> None:
            raise SnapshotError("cannot write")

    first, last = ListTracker(), ListTracker()
    with pytest.raises(SnapshotError, match="cannot write"):
        Trackers({"first": first, "broken": Broken(), "last": last}).close()
    assert first.closed
    assert last.closed


@pytest.mark.parametrize("curve", [CURVE, EMPTY])
def test_png(tmp_path: Path, curve: LearningCurve) -> None:
    import matplotlib

    draw_png(curve, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert not getattr(matplotlib, "pyplot", None) or not matplotlib.pyplot.get_fignums()
    with pytest.raises(SnapshotError, match=r"cannot write .*/no/such/curve\.png: No such file or directory"):
        draw_png(curve, tmp_path / "no" / "such" / "curve.png")


def test_smoothing_never_looks_ahead() -> None:
    assert smoothed((1.0, 2.0, 3.0, 10.0), window=3) == [1.0, 1.5, 2.0, 5.0]


@pytest.mark.parametrize(("curve", "marks"), [(CURVE, 4), (EMPTY, 0)])
def test_curve_as_text(curve: LearningCurve, marks: int) -> None:
    text = draw_text(curve, 80, 16)
    lines = text.plain.splitlines()
    assert (len(lines), max(map(len, lines))) == (16, 80)
    assert curve.title in lines[0]
    assert sum(line.count("●") for line in lines[1:-1]) == marks
    assert draw_text(curve, 80, 16) == text  # nothing is left from one drawing to the next


def report(console: Console) -> None:
    episodes = [
        episode(1, "395", RewardResult(1.0)),
        episode(2, "[red]3\n9", RewardResult(0.2)),
        episode(3, "x" * 500, RewardResult.failed("no progress")),
        episode(4, "not shown", None),
    ]
    places = {"model": Path("runs/quickstart/final"), "learning curve": Path("runs/[x]/curve.png")}
    samples = [SampleRecord.of(each) for each in episodes]
    final_report(console, SUMMARY, CURVE, samples, places, "tandem eval runs/quickstart/final", solved=1.0)


def test_final_report_without_a_terminal() -> None:
    file = io.StringIO()
    report(Console(file=file, width=80))
    text = file.getvalue()
    assert text.replace("\n", "").isprintable()
    for expected in (
        "512 held-out tasks, 60 steps, 1:11 min",
        "│ pass@1, sampled │  31.2% │ 96.0% │ +64.8 pts │",
        "│ pass@1, greedy  │  50.0% │ 40.0% │ -10.0 pts │",
        "│ pass@4          │  75.0% │ 75.0% │  +0.0 pts │",
        "✓ 17 * 23 + 4 =\n  → 395   (reward 1, stop)",
        "✗ 17 * 23 + 4 =\n  → [red]3 ⏎ 9   (reward 0.2, stop)",
        "x…   (reward none, stop)",
        CURVE.title,
        "model            runs/quickstart/final\n",
        "learning curve   runs/[x]/curve.png\n",
        "try next         tandem eval runs/quickstart/final\n",
    ):
        assert expected in text
    assert "pass@8" not in text
    assert "not shown" not in text


LIMITS = Summary(
    eval_before={"greedy": 0.25, "cut_off": 0.5, "n": 8, "failed": 0, "training_limit/greedy": 0.0, "training_limit/cut_off": 1.0},
    eval_after={"greedy": 0.75, "cut_off": 0.25, "n": 8, "failed": 0, "training_limit/greedy": 0.5, "training_limit/cut_off": 0.5},
    steps=2,
    wall_s=3.0,
)


def test_what_was_measured_under_the_limit_of_training_stands_apart(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", LIMITS)
    body = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert list(body) == ["eval_before", "eval_after", "training_limit", "steps", "wall_s"]
    assert body["eval_before"] == {"greedy": 0.25, "cut_off": 0.5, "n": 8, "failed": 0}
    assert body["training_limit"] == {
        "eval_before": {"greedy": 0.0, "cut_off": 1.0},
        "eval_after": {"greedy": 0.5, "cut_off": 0.5},
    }
    assert read_summary(tmp_path / "summary.json") == LIMITS
    console = Console(file=io.StringIO(), width=80)
    console.print(before_after(LIMITS))
    assert isinstance(console.file, io.StringIO)
    for row in (
        "│ pass@1, greedy                    │  25.0% │ 75.0% │ +50.0 pts │",
        "│ cut off                           │  50.0% │ 25.0% │ -25.0 pts │",
        "│ pass@1, greedy, limit of training │   0.0% │ 50.0% │ +50.0 pts │",
        "│ cut off, limit of training        │ 100.0% │ 50.0% │ -50.0 pts │",
    ):
        assert row in console.file.getvalue()


def caption(before: dict[str, float], after: dict[str, float]) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(before_after(Summary({"greedy": 0.25} | before, {"greedy": 0.75} | after, 2, 3.0)))
    return " ".join(file.getvalue().partition("┘")[2].split())


def test_what_was_not_measured_alike_is_told() -> None:
    wide = {"n": 8, "max_tokens": 320, "training_limit/greedy": 0.0, "training_limit/max_tokens": 12}
    assert caption(wide, wide) == ""
    assert caption({"n": 8}, {"n": 8, "max_tokens": 12}) == "", "nobody knows"
    assert caption(wide, {"n": 8, "max_tokens": 12}) == "before and after do not compare: 320 tokens at most before, 12 after"
    assert caption(wide, wide | {"n": 4, "training_limit/max_tokens": 16}) == (
        "before and after do not compare: 8 held-out tasks before, 4 after; 12 tokens at most, limit of training before, 16 after"
    )


def test_final_report_in_a_terminal() -> None:
    file = io.StringIO()
    report(Console(file=file, width=60, force_terminal=True, _environ={"TERM": "xterm-256color"}))
    assert "\x1b[" in file.getvalue()
