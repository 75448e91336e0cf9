from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from tandem.assemble.restarts import Restarts
from tandem.checkpoint.snapshots import SnapshotConfig, SnapshotStore

DEATH = "rank 1 (process 7 on host) of pool trainer was killed by SIGKILL, and its peers were ended. It wrote nothing to its log."


@dataclass
class Workers:
    """Of a phase, of whom one died or none."""

    death: str = ""

    def tell(self, tell: Callable[[str], None]) -> None:
        self.told = tell


class Case:
    """Restarts of a run in phase `train`, and what they print."""

    def __init__(self, most: int, directory: Path) -> None:
        self.out = io.StringIO()
        self.store = SnapshotStore(directory, SnapshotConfig(), {})
        self.restarts = Restarts(most, Console(file=self.out, width=40))

    def after_an_error(self, death: str = DEATH) -> bool:
        self.restarts.watch("train", self.store, Workers(death))
        return self.goes_on()

    def goes_on(self) -> bool:
        async def ask() -> bool:
            return self.restarts.go_on()

        return asyncio.run(ask())


def test_a_death_is_told_in_a_line_with_where_the_run_goes_on(tmp_path: Path) -> None:
    case = Case(1, tmp_path)
    assert case.after_an_error()
    assert case.out.getvalue() == f"warning: train goes on by itself from its beginning (restart 1): {DEATH}\n"
    asyncio.run(snapshot(case.store, 3))
    case.restarts.reached("step of train", 3)
    assert case.after_an_error()
    assert "train goes on by itself from step 3 (restart 2): rank 1" in case.out.getvalue()
    assert case.restarts.total == 2


async def snapshot(store: SnapshotStore, step: int) -> None:
    await (await store.begin(step, {}, {}))()


def test_an_error_without_a_death_is_an_error(tmp_path: Path) -> None:
    case = Case(3, tmp_path)
    assert not case.after_an_error("")
    assert not case.goes_on(), "nothing runs"
    assert not case.out.getvalue()
    assert case.restarts.total == 0


def test_what_the_workers_tell_is_said(tmp_path: Path) -> None:
    case, workers = Case(3, tmp_path), Workers()
    case.restarts.watch("train", case.store, workers)
    workers.told("pool rollout-1 is there again")
    assert case.out.getvalue() == "warning: pool rollout-1 is there again\n"


def test_with_0_a_death_ends_the_run(tmp_path: Path) -> None:
    case = Case(0, tmp_path)
    assert not case.after_an_error()
    assert not case.out.getvalue()


@pytest.mark.parametrize("most", [1, 3])
def test_what_comes_no_further_does_not_go_on_for_ever(most: int, tmp_path: Path) -> None:
    case = Case(most, tmp_path)
    case.restarts.reached("step of train", 5)
    for _ in range(most):
        assert case.after_an_error()
        case.restarts.reached("step of train", 4)
        case.restarts.reached("step of train", 5)
    assert not case.after_an_error()
    assert f"train came no further since restart {most}, and does not go on by itself again" in case.out.getvalue()


@pytest.mark.parametrize("what", ["step of train", "snapshot of train"])
def test_whatever_is_new_counts_as_further(what: str, tmp_path: Path) -> None:
    case = Case(1, tmp_path)
    for step in range(1, 5):
        assert case.after_an_error()
        case.restarts.reached("step of train", 1)
        case.restarts.reached(what, step)
    assert case.restarts.total == 4


def test_a_restart_is_logged_once_and_with_its_phase(tmp_path: Path) -> None:
    case = Case(1, tmp_path)
    assert not case.restarts.logged("train")
    case.after_an_error()
    assert not case.restarts.logged("warmup")
    assert case.restarts.logged("train")
    assert not case.restarts.logged("train")


def test_ctrl_c_ends_a_run_whatever_else_died(tmp_path: Path) -> None:
    case = Case(1, tmp_path)
    went_on: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            case.restarts.watch("train", case.store, Workers(DEATH))
            went_on.append(case.restarts.go_on())

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(main())
    assert went_on == [False]
