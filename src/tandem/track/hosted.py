"""Trackers whose record is kept by a service and its client: what they share, so that an adapter is a client and little else.

Such a record cannot be cut back as a file can. A resumed run therefore goes on in the same record: `NAME.jsonl` in the run's
directory remembers the record's id and, of a service that would hold two values for a step, what was sent, also by a process that
was killed since. The record then keeps what it was told first of a step that a resumed run repeats; metrics.jsonl has the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from tandem.durable import AppendLog, records
from tandem.errors import ConfigError
from tandem.types import Json, Metrics


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is made for. directory: of the run, or of its phase. config: every value of the recipe, by dotted name."""

    directory: Path
    name: str
    config: Mapping[str, Json]


class Client(Protocol):
    """A service's own client, as an adapter uses it."""

    def send(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Connect(Protocol):
    def __call__(self, run: TrackedRun, record: str, *, begun: bool) -> Client:
        """A client of the record with this id, which is made now or was made before (`begun`)."""
        ...


class HostedTracker:
    """Implements ports.Tracker; the service is spoken to when something is logged first.

    repeats: that the service itself sees to it that a step's value counts once, as those do whose clients may lose the last
    seconds of a process that is killed. refusals: what its client raises where it has no account or no server to talk to.
    """

    def __init__(
        self, run: TrackedRun, service: str, connect: Connect, *, repeats: bool, refusals: tuple[type[Exception], ...] = ()
    ) -> None:
        self._run, self._service, self._connect, self._repeats, self._refusals = run, service, connect, repeats, refusals
        self._path = run.directory / f"{service}.jsonl"
        self._client: Client | None = None
        self._log: AppendLog | None = None
        self._sent: dict[int, set[str]] = {}
        self._record = ""

    def log(self, metrics: Metrics, step: int) -> None:
        """Raises ConfigError where the service's client refuses to begin."""
        client, log = self._opened()
        values = {name: value for name, value in metrics.values_by_name().items() if name not in self._sent.get(step, ())}
        if not values:
            return
        client.send(values, step)
        if not self._repeats:
            log.append({"step": step, "names": list(values)})

    def state(self) -> dict[str, Json]:
        return {}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Nothing can be forgotten; see the module's docstring."""

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if self._log is not None:
            self._log.close()

    def _opened(self) -> tuple[Client, AppendLog]:
        if self._client is None or self._log is None:
            first, *sent = records(self._path) if self._path.is_file() else ({},)
            self._record = cast("str", first.get("record", "")) or secrets.token_hex(8)
            for line in sent:
                self._sent.setdefault(cast("int", line["step"]), set()).update(cast("list[str]", line["names"]))
            try:
                self._client = self._connect(self._run, self._record, begun=bool(first))
            except self._refusals as error:
                said = " ".join(str(error).split())
                raise ConfigError(
                    f"logs names {self._service}, whose client refuses: {said}; give it what it asks for, or see "
                    f"docs/guides/tracking.md for how to do without a server, or leave {self._service} out of logs"
                ) from error
            self._log = AppendLog(self._path)
            if not first:
                self._log.append({"record": self._record})
        return self._client, self._log
