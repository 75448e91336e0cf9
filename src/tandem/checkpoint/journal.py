"""What a clock decided, written down: a judgement that a repeat might not give again (a time-out, a remote judge).

A resumed run asks here before it judges, so that it goes on as it would have without the interruption. A result is on
the disk when `record` returns, which costs a sync: what is computed the same way every time does not belong here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tandem.durable import AppendLog, records
from tandem.types import Json, RewardResult


class Journal:
    """Reward results by key, in a file of JSON lines; of two with one key the later counts. Opened at the first call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _log(self) -> AppendLog:
        return AppendLog(self._path)

    @cached_property
    def _results(self) -> dict[str, RewardResult]:
        assert self._log  # opening it cuts a torn last line
        return {str(record["key"]): _result(record) for record in records(self._path)}

    def __len__(self) -> int:
        return len(self._results)

    def record(self, results: Mapping[str, RewardResult]) -> None:
        for key, result in results.items():
            self._log.append(_record(key, result))
        self._log.offset()
        self._results.update(results)

    def get(self, key: str) -> RewardResult | None:
        return self._results.get(key)

    def close(self) -> None:
        if "_log" in vars(self):
            self._log.close()


def _record(key: str, result: RewardResult) -> dict[str, Json]:
    return {"key": key, **asdict(result)}


def _result(record: dict[str, Json]) -> RewardResult:
    fields = cast("dict[str, Any]", record)
    return RewardResult(
        value=fields["value"],
        components=fields["components"],
        token_rewards=tuple((position, value) for position, value in fields["token_rewards"]),
        reason=fields["reason"],
    )
