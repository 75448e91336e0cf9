"""What a clock decided, written down: a judgement that a repeat might not give again (a time-out, a remote judge).

A resumed run asks here before it judges, so that it goes on as it would have without the interruption. A result is on
the disk when `record` returns, which costs a sync each: what is computed the same way every time does not belong here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from tandem.durable import AppendLog, dump, records, write_whole
from tandem.types import Json, RewardResult


class Journal:
    """Reward results by key, in a file of JSON lines; of two with one key the later counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = AppendLog(path)
        self._results = {str(record["key"]): _result(record) for record in records(path)}

    def __len__(self) -> int:
        return len(self._results)

    def record(self, key: str, result: RewardResult) -> None:
        self._log.append(_record(key, result))
        self._log.offset()
        self._results[key] = result

    def get(self, key: str) -> RewardResult | None:
        return self._results.get(key)

    def forget(self, keys: Collection[str]) -> None:
        """Drops results that a durable snapshot has consumed; the file holds the others when this returns."""
        gone = self._results.keys() & set(keys)
        if not gone:
            return
        self._results = {key: result for key, result in self._results.items() if key not in gone}
        self._log.close()
        write_whole(self._path, "".join(dump(_record(key, result)) + "\n" for key, result in self._results.items()))
        self._log = AppendLog(self._path)

    def close(self) -> None:
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
