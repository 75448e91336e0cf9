"""The laws of ports.Tracker, for every adapter and the fake: what is logged can be read back once, also after a crash."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from tandem.ports import Tracker
from tandem.track.console import ConsoleTracker, Field
from tandem.track.fake import ListTracker
from tandem.track.fan_out import Trackers
from tandem.track.jsonl import JsonlTracker
from tandem.track.tensorboard import TensorBoardTracker
from tandem.track.trace import TraceTracker
from tandem.types import Json, Metric, Metrics

Lines = list[tuple[int, dict[str, float]]]


class Adapter:
    """Opens a tracker on the same record again and again, and reads that record (None where it keeps none)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Tracker:
        raise NotImplementedError

    def read(self) -> Lines | None:
        raise NotImplementedError


class Jsonl(Adapter):
    def open(self) -> Tracker:
        return JsonlTracker(self.path / "metrics.jsonl")

    def read(self) -> Lines:
        lines: Lines = []
        for line in (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line, parse_constant=pytest.fail)
            step, nonfinite = record.pop("step"), record.pop("nonfinite", [])
            assert record.pop("time") > 0
            assert nonfinite == [name for name, value in record.items() if value is None]
            lines.append((step, {name: math.nan if value is None else value for name, value in record.items()}))
        return lines


class TensorBoard(Adapter):
    def open(self) -> Tracker:
        return TensorBoardTracker(self.path / "tensorboard")

    def read(self) -> Lines:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        if not (self.path / "tensorboard").exists():
            return []
        accumulator = EventAccumulator(str(self.path / "tensorboard"), purge_orphaned_data=True)
        accumulator.Reload()
        lines: dict[int, dict[str, float]] = {}
        for name in accumulator.Tags()["scalars"]:
            for event in accumulator.Scalars(name):
                lines.setdefault(event.step, {})[name] = event.value
        return sorted(lines.items())


class Silent(Adapter):
    def open(self) -> Tracker:
        console = Console(file=io.StringIO(), force_terminal=False)
        return ConsoleTracker("phase", 9, [Field("loss", "loss {:.2f}")], console=console)

    def read(self) -> None:
        return None


class Trace(Silent):
    def open(self) -> Tracker:
        return TraceTracker(self.path / "trace.json", tuple)


class Fake(Adapter):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tracker = ListTracker()

    def open(self) -> Tracker:
        return self.tracker

    def read(self) -> Lines:
        return [(step, metrics.values_by_name()) for step, metrics in self.tracker.lines]


class Several(Jsonl):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fake = ListTracker()

    def open(self) -> Tracker:
        return Trackers({"jsonl": super().open(), "list": self.fake})

    def read(self) -> Lines:
        lines = super().read()
        assert [step for step, _ in lines] == [step for step, _ in self.fake.lines]
        return lines


@pytest.fixture(params=[Jsonl, TensorBoard, Silent, Trace, Fake, Several])
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Adapter:
    make: Callable[[Path], Adapter] = request.param
    return make(tmp_path)


def saved(tracker: Tracker) -> dict[str, Json]:
    """The tracker's state as a snapshot keeps it: through JSON."""
    return cast("dict[str, Json]", json.loads(json.dumps(tracker.state(), allow_nan=False)))


def log(tracker: Tracker, *steps: int, sign: int = 1) -> None:
    for step in steps:
        tracker.log(Metrics.mean({"loss": sign * step / 2, "train/lr": 0.5}) + Metrics.sum({"rows": 2}), step)


def expected(*steps: int, sign: int = 1) -> Lines:
    return [(step, {"loss": sign * step / 2, "train/lr": 0.5, "rows": 2.0}) for step in steps]


def test_what_is_logged_is_read_back(adapter: Adapter) -> None:
    tracker = adapter.open()
    log(tracker, 1, 2)
    tracker.log(Metrics(), 3)
    tracker.close()
    lines = adapter.read()
    assert lines is None or [line for line in lines if line[1]] == expected(1, 2)


def test_nan_and_infinity_are_not_lost_and_not_zero(adapter: Adapter) -> None:
    tracker = adapter.open()
    tracker.log(Metrics.mean({"good": 1.0}) + Metrics({"nan": Metric(0, 0), "inf": Metric(math.inf)}), 1)
    tracker.close()
    lines = adapter.read()
    if lines is not None:
        assert (lines[0][1]["good"], math.isfinite(lines[0][1]["nan"]), math.isfinite(lines[0][1]["inf"])) == (1, False, False)


def test_a_resumed_run_records_each_step_once(adapter: Adapter) -> None:
    killed = adapter.open()
    log(killed, 1, 2)
    state = saved(killed)
    log(killed, 3, 4, sign=-1)
    resumed = adapter.open()
    resumed.restore(state)
    assert saved(resumed) == state
    log(resumed, 3)
    resumed.close()
    killed.close()
    assert adapter.read() in (None, expected(1, 2, 3))


def test_resuming_before_the_first_snapshot_starts_over(adapter: Adapter) -> None:
    killed = adapter.open()
    log(killed, 1, 2, sign=-1)
    resumed = adapter.open()
    resumed.restore({})
    log(resumed, 1)
    resumed.close()
    killed.close()
    assert adapter.read() in (None, expected(1))


def test_closing_without_logging_leaves_an_empty_record(adapter: Adapter) -> None:
    tracker = adapter.open()
    tracker.state()
    tracker.close()
    assert not adapter.read()
