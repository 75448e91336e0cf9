"""TensorBoard scalars.

Two phases that count their steps from the beginning belong in two directories: resuming hides every later step of a
directory, whatever its metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tandem.durable import attempt
from tandem.track.hosted import TrackedRun
from tandem.types import Json, Metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


def _scalars(metrics: Metrics) -> Any:
    """All of a step as one event of TensorBoard: one each takes ten times as long."""
    summary = import_module("tensorboard.compat.proto.summary_pb2").Summary()
    for name, value in metrics.values_by_name().items():
        summary.value.add(tag=name, simple_value=value)
    return summary


class TensorBoardTracker:
    """Implements ports.Tracker. The event file is made when something is logged first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._last = -1
        self._purge_step: int | None = None

    @classmethod
    def of(cls, run: TrackedRun) -> TensorBoardTracker:
        return cls(run.directory / "tensorboard")

    def log(self, metrics: Metrics, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        with attempt(f"write TensorBoard events in {self._directory}", self._directory):
            if self._writer is None:
                self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
            cast("Any", self._writer).file_writer.add_summary(_scalars(metrics), step)
            self._writer.flush()
        self._last = step

    def state(self) -> dict[str, Json]:
        return {"step": self._last}

    def restore(self, state: Mapping[str, Json]) -> None:
        step = state.get("step", -1)
        assert isinstance(step, int), f"state {dict(state)} is not TensorBoard's"
        self._last, self._purge_step = step, step + 1

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with attempt(f"write TensorBoard events in {self._directory}", self._directory):
                writer.close()
