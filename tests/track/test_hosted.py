"""Trackers of services, each with its own client and no network: what was sent is read from what the client keeps on disk."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

import pytest

from tandem.errors import ConfigError
from tandem.track.hosted import HostedTracker, TrackedRun
from tandem.types import Metric, Metrics

Values = dict[int, dict[str, float]]
"""By step and name."""

RUN = """
import os, signal, sys
from pathlib import Path
from tandem.assemble.trackers import find_trackers
from tandem.track.hosted import TrackedRun
from tandem.types import Metric, Metrics

name, directory, steps, kill = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3].split(",")), sys.argv[4] == "kill"
tracker = find_trackers([name])[name](TrackedRun(directory, "mine", {"seed": 7, "train.lr": 1e-3, "run.dir": None, "logs": [name]}))
tracker.restore({})
sign = 1 if kill else -1
for step in steps:
    tracker.log(Metrics.mean({"loss": sign * step / 2}) + Metrics.sum({"eval/pass@1": 0.5}), step)
    tracker.log(Metrics({"nan": Metric(0, 0)}), step)
if kill:
    import time
    time.sleep(float(sys.argv[5]))
    os.kill(os.getpid(), signal.SIGKILL)
tracker.close()
"""


def logged(name: str, directory: Path, steps: str, *kill: str) -> int:
    """The exit code of a process of its own that logs these steps, as the clients' threads and hooks would be the test's."""
    offline = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "TRACKIO_DIR": str(directory / "trackio")}
    command = [sys.executable, "-W", "ignore", "-c", RUN, name, str(directory), steps, *(kill or ("end",))]
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def wandb_values(directory: Path) -> Values:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader  # reads wandb's files, as wandb's own package cannot
    from wandb.proto import wandb_internal_pb2

    found: Values = {}
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in scanned(WBDataStoreReader(), path):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
                found.setdefault(record.history.step.num, {}).update(
                    {name: value for name, value in values.items() if name[0] != "_"}
                )
    return found


def swanlab_values(directory: Path) -> Values:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: Values = {}
    for path in sorted(directory.glob("swanlab/run-*/*.swanlab"), key=lambda path: path.stat().st_mtime):
        for data in scanned(DataStoreReader(), path):
            record: Any = Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                found.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
    return found


def scanned(reader: Any, path: Path) -> Iterator[bytes]:
    reader.open(path)
    while (data := reader.scan()) is not None:
        yield data
    reader.close()


def trackio_values(directory: Path) -> Values:
    found: Values = {}
    with sqlite3.connect(directory / "trackio/tandem.db") as database:
        for step, values in database.execute("select step, metrics from metrics order by id"):
            pairs = {name: float(value) for name, value in json.loads(values).items()}
            assert not pairs.keys() & found.setdefault(step, {}).keys(), "sent twice"
            found[step].update(pairs)
    database.close()
    return found


def mlflow_values(directory: Path) -> Values:
    found: Values = {}
    with sqlite3.connect(directory / "mlflow.db") as database:
        for name, value, step, is_nan in database.execute("select key, value, step, is_nan from metrics"):
            name = name.replace("_at_", "@")
            assert name not in found.setdefault(step, {}), "sent twice"
            found[step][name] = math.nan if is_nan else value
        assert dict(database.execute("select key, value from params"))["train.lr"] == "0.001"
    database.close()
    return found


SERVICES: dict[str, Callable[[Path], Values]] = {
    "wandb": wandb_values,
    "swanlab": swanlab_values,
    "trackio": trackio_values,
    "mlflow": mlflow_values,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_a_run_that_is_killed_and_resumed_is_one_record_with_each_value_once(name: str, tmp_path: Path) -> None:
    assert logged(name, tmp_path, "1,2", "kill", "2") == -9
    assert logged(name, tmp_path, "2,3") == 0
    values = SERVICES[name](tmp_path)
    assert values.keys() == {1, 2, 3}
    assert [value.pop("nan") for value in values.values()] == pytest.approx([math.nan] * 3, nan_ok=True)
    assert values == {step: {"loss": sign * step / 2, "eval/pass@1": 0.5} for step, sign in ((1, 1), (2, 1), (3, -1))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_run_that_is_resumed_goes_on_in_the_record_of_a_service_that_sees_to_repeats(name: str, tmp_path: Path) -> None:
    assert logged(name, tmp_path, "1,2") == 0
    assert logged(name, tmp_path, "2,3") == 0
    values = SERVICES[name](tmp_path)
    assert [value.pop("nan") for value in values.values()] == pytest.approx([math.nan] * 3, nan_ok=True)
    assert values == {step: {"loss": -step / 2, "eval/pass@1": 0.5} for step in (1, 2, 3)}
    places = list(tmp_path.glob(f"{name}/*run-*"))
    assert len({place.name.rpartition("-")[2] for place in places}) == 1, "two records"


class ListClient:
    def __init__(self, run: TrackedRun, record: str, *, begun: bool) -> None:
        OPENED.append((run.name, record, begun))

    def send(self, values: Any, step: int) -> None:
        SENT.append((step, dict(values)))

    def close(self) -> None:
        OPENED.append(("closed", "", False))


OPENED: list[tuple[str, str, bool]] = []
SENT: list[tuple[int, dict[str, float]]] = []


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Callable[..., HostedTracker]]:
    """Opens a tracker on the same record, as a process after another does, with nothing sent yet."""
    OPENED.clear()
    SENT.clear()
    with ExitStack() as stack:

        def opened(*, repeats: bool = False) -> HostedTracker:
            run = TrackedRun(tmp_path, "mine", {})
            return stack.enter_context(closing(HostedTracker(run, "list", ListClient, repeats=repeats)))

        yield opened


def test_nothing_is_opened_before_something_is_logged(hosted: Callable[..., HostedTracker], tmp_path: Path) -> None:
    tracker = hosted()
    tracker.restore({})
    tracker.close()
    assert OPENED == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_did_not_send_of_a_step_is_sent_by_the_next(hosted: Callable[..., HostedTracker]) -> None:
    hosted().log(Metrics.mean({"loss": 1.0}), 4)
    resumed = hosted()
    resumed.log(Metrics.mean({"loss": 2.0, "eval/loss": 3.0}), 4)
    resumed.log(Metrics.mean({"loss": 2.0}), 4)
    assert SENT == [(4, {"loss": 1.0}), (4, {"eval/loss": 3.0})]
    assert [begun for _, _, begun in OPENED] == [False, True]
    assert len({record for _, record, _ in OPENED}) == 1


def test_a_service_that_sees_to_repeats_itself_is_told_again(hosted: Callable[..., HostedTracker]) -> None:
    for _ in range(2):
        hosted(repeats=True).log(Metrics.mean({"loss": 1.0}), 4)
    assert SENT == [(4, {"loss": 1.0})] * 2
    assert len({record for _, record, _ in OPENED}) == 1


def test_a_client_without_an_account_is_one_message_and_begins_no_record(tmp_path: Path) -> None:
    def refused(run: TrackedRun, record: str, *, begun: bool) -> ListClient:
        raise PermissionError("No API key\nconfigured.")

    tracker = HostedTracker(TrackedRun(tmp_path, "mine", {}), "list", refused, repeats=True, refusals=(PermissionError,))
    with pytest.raises(ConfigError, match=r"logs names list, whose client refuses: No API key configured\.; .*tracking\.md"):
        tracker.log(Metrics.mean({"loss": 1.0}), 1)
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_metric_of_nothing_is_sent_as_what_it_is(hosted: Callable[..., HostedTracker]) -> None:
    hosted().log(Metrics({"nothing": Metric(0, 0)}), 1)
    assert math.isnan(cast("float", SENT[0][1]["nothing"]))
