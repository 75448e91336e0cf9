"""MLflow, through its own client: the server at MLFLOW_TRACKING_URI, or a database in the run's directory.

Its names of metrics have no "@": "eval/pass@1" is "eval/pass_at_1" there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tandem.track.hosted import HostedTracker, TrackedRun

_RECORD = "tandem.record"


class _Client:
    def __init__(self, run: TrackedRun, record: str, *, begun: bool) -> None:
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.directory.resolve() / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tandem")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        found: list[Any] = self._client.search_runs([number], f"tags.`{_RECORD}` = '{record}'") if begun else []
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(number, run_name=run.name, tags={_RECORD: record}).info.run_id
        values = [(key, str(value)[:6000]) for key, value in run.config.items()]
        for start in range(0, len(values), 100):  # of one request, at most
            params = [Param(key.replace("@", "_at_"), value) for key, value in values[start : start + 100]]
            self._client.log_batch(self._id, params=params)

    def send(self, values: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name.replace("@", "_at_"), value, now_ms, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def tracker(run: TrackedRun) -> HostedTracker:
    return HostedTracker(run, "mlflow", _Client, repeats=False, refusals=(MlflowException,))
