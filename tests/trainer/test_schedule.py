"""Modes as values."""

from __future__ import annotations

import pytest

from tandem.errors import ConfigError
from tandem.trainer.schedule import Mode, schedule


def test_sync_is_never_stale_and_holds_one_batch() -> None:
    sync = schedule("sync")
    assert (sync.placement, sync.interrupt, sync.worst_age, sync.window, sync.in_flight(8)) == ("colocated", False, 0, 0, 8)
    sync.check_runnable(one_process=True)


@pytest.mark.parametrize(("mode", "placement"), [("colocate_async", "colocated"), ("separate_async", "separate")])
def test_asynchronous_modes_have_their_value(mode: Mode, placement: str) -> None:
    value = schedule(mode, 2)
    assert (value.placement, value.interrupt, value.worst_age, value.in_flight(8)) == (placement, True, 2, 24)
    assert schedule(mode).staleness == 1
    value.check_runnable(one_process=False)


def test_one_process_cannot_train_and_generate_at_once() -> None:
    schedule("colocate_async").check_runnable(one_process=True)
    with pytest.raises(ConfigError, match=r"trainer\.mode=separate_async .* add runtime=process"):
        schedule("separate_async").check_runnable(one_process=True)


@pytest.mark.parametrize(("mode", "staleness"), [("sync", 1), ("separate_async", 0)])
def test_a_staleness_that_contradicts_its_mode_is_refused(mode: Mode, staleness: int) -> None:
    with pytest.raises(ConfigError, match=f"staleness={staleness} contradicts"):
        schedule(mode, staleness)
