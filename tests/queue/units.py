"""The storage units of the tests: one set for all queues of this process, which goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.runtime.ray_cluster import cluster

if TYPE_CHECKING:
    from tandem.queue.units import RunningUnits, StorageUnits

_started: list[RunningUnits] = []


async def running() -> StorageUnits:
    """As a client has them, whose `close` ends nothing."""
    from tandem.queue.units import StorageUnits, start

    cluster()
    if not _started:
        _started.append(await start())
    return StorageUnits(_started[0].addresses)
