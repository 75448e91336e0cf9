"""Modes as values."""

from __future__ import annotations

import pytest

from tandem.errors import ConfigError
from tandem.trainer.schedule import schedule


def test_sync_is_never_stale_and_holds_one_batch() -> None:
    sync = schedule("sync")
    assert (sync.placement, sync.interrupt, sync.worst_age, sync.window, sync.in_flight(8)) == ("colocated", False, 0, 0, 8)
    sync.check_runnable()


@pytest.mark.parametrize(
    ("mode", "placement", "lend"), [("colocate_async", "colocated", False), ("separate_async", "separate", True)]
)
def test_asynchronous_modes_have_their_value_and_refuse_to_run(mode: str, placement: str, lend: bool) -> None:
    value = schedule(mode, 2)  # type: ignore[arg-type]
    assert (value.placement, value.lend, value.interrupt, value.worst_age, value.in_flight(8)) == (placement, lend, True, 2, 24)
    with pytest.raises(ConfigError, match=rf"trainer\.mode={mode}.*sync"):
        value.check_runnable()


@pytest.mark.parametrize(("mode", "staleness"), [("sync", 1), ("separate_async", 0)])
def test_a_staleness_that_contradicts_its_mode_is_refused(mode: str, staleness: int) -> None:
    with pytest.raises(ConfigError, match=f"staleness={staleness} contradicts"):
        schedule(mode, staleness)  # type: ignore[arg-type]
