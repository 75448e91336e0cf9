"""tests/faults/test_surroundings.py has whole runs whose disks are slow, stuck or full."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tandem.checkpoint.snapshots import SnapshotConfig, SnapshotStore
from tandem.checkpoint.under_way import UnderWay
from tandem.errors import EngineError, SnapshotError, StalledError

Use = Callable[[UnderWay], Awaitable[None]]


def used(path: Path, use: Use, *, limit_s: float = 60.0) -> list[str]:
    """The warnings."""
    warnings: list[str] = []

    async def scenario() -> None:
        async with UnderWay(SnapshotStore(path, SnapshotConfig(), {}), limit_s, warnings.append) as snapshots:
            await use(snapshots)

    asyncio.run(scenario())
    return warnings


async def failing() -> None:
    raise SnapshotError("the disk is full")


def test_the_run_goes_on_and_its_end_waits(tmp_path: Path) -> None:
    done: list[str] = []

    async def write(allowed: asyncio.Event) -> None:
        await allowed.wait()
        done.append("written")

    async def use(snapshots: UnderWay) -> None:
        for step in (1, 2):
            allowed = asyncio.Event()
            await snapshots.ended()
            snapshots.start(step, write(allowed))
            await asyncio.sleep(0)
            snapshots.look()
            done.append("gone on")
            allowed.set()
        assert done == ["gone on", "written", "gone on"]

    assert used(tmp_path, use) == []
    assert done == ["gone on", "written"] * 2


@pytest.mark.parametrize("asks", ["look", "ended", "the end"])
def test_what_went_wrong_is_raised_where_it_is_asked_for_first(tmp_path: Path, asks: str) -> None:
    async def use(snapshots: UnderWay) -> None:
        snapshots.start(1, failing())
        if asks == "look":
            await asyncio.sleep(0)
            snapshots.look()
        elif asks == "ended":
            await snapshots.ended()
        else:
            return
        raise AssertionError("nothing was raised")

    with pytest.raises(SnapshotError, match="the disk is full"):
        used(tmp_path, use)


def test_beside_another_error_it_is_told(tmp_path: Path) -> None:
    warnings: list[str] = []

    async def scenario() -> None:
        async with UnderWay(SnapshotStore(tmp_path, SnapshotConfig(), {}), 60, warnings.append) as snapshots:
            snapshots.start(7, failing())
            raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        asyncio.run(scenario())
    assert warnings == ["the snapshot of step 7 is not there: the disk is full"]


def test_it_is_waited_for_as_long_as_it_grows(tmp_path: Path) -> None:
    async def slow() -> None:
        draft = tmp_path / SnapshotStore(tmp_path, SnapshotConfig(), {})._aside(Path("step-00000003")).name
        draft.mkdir()
        with (draft / "file").open("wb", buffering=0) as file:
            for _ in range(8):
                await asyncio.sleep(0.1)
                file.write(b"more")

    async def stuck() -> None:
        await asyncio.Event().wait()

    async def use(snapshots: UnderWay) -> None:
        snapshots.start(3, slow())
        await snapshots.ended()
        snapshots.start(4, stuck())

    expected = (
        r"the snapshot of step 4 is not whole, and nothing was written for 0\.2 s, after 32 bytes: look at the disk of .*stuck"
    )
    with pytest.raises(StalledError, match=f"(?s){expected}"):
        used(tmp_path, use, limit_s=0.2)
