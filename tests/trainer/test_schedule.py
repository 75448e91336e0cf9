"""Modes as values."""

from __future__ import annotations

import pytest

from tandem.algos.table import configure
from tandem.errors import ConfigError
from tandem.trainer.schedule import Mode, TooOld, schedule


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
    with pytest.raises(ConfigError, match=r"trainer\.mode=separate_async .* say runtime=process"):
        schedule("separate_async").check_runnable(one_process=True)


@pytest.mark.parametrize(("mode", "staleness"), [("sync", 1), ("separate_async", 0)])
def test_a_staleness_that_contradicts_its_mode_is_refused(mode: Mode, staleness: int) -> None:
    with pytest.raises(ConfigError, match=f"staleness={staleness} contradicts"):
        schedule(mode, staleness)


@pytest.mark.parametrize(
    ("mode", "window", "too_old", "complaint"),
    [
        ("sync", 1, None, "use rollout.spare_groups"),
        ("sync", 0, "mask", "are of the asynchronous modes"),
        ("colocate_async", 1, None, "say what becomes of them, trainer.too_old=mask, drop or correct"),
        ("separate_async", 0, "drop", "in strict order nothing is older than trainer.staleness=1"),
        ("separate_async", -1, "drop", "must not be negative, got -1"),
    ],
)
def test_an_order_that_contradicts_itself_is_refused(mode: Mode, window: int, too_old: TooOld | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        schedule(mode, None, window, too_old)


def test_a_bound_that_is_off_says_so_and_asks_for_a_correction() -> None:
    loose = schedule("colocate_async", 2, 3, "correct")
    assert (loose.worst_age, schedule("colocate_async", 2, 3, "mask").worst_age) == (None, 2)
    plain, corrected = configure("grpo"), configure("grpo", {"correction": "token_tis"})
    with pytest.raises(ConfigError, match=r"too_old=correct .* grpo does not correct .* algorithm\.correction=icepop"):
        loose.check_correction(plain)
    loose.check_correction(corrected)
    assert "nothing bounds how old a sample is" in (loose.warning(corrected) or "")
    assert "grpo does not correct" in (schedule("separate_async").warning(plain) or "")
    assert schedule("separate_async").warning(corrected) is None
    assert schedule("sync").warning(plain) is None


def test_a_run_goes_on_with_a_schedule_that_can_train_on_what_it_holds() -> None:
    strict, loose = schedule("colocate_async", 2), schedule("colocate_async", 2, 3, "mask")
    strict.check_resumable(loose, "runs/a")
    loose.check_resumable(schedule("separate_async", 2, 1, "drop"), "runs/a")
    with pytest.raises(ConfigError, match=r"2 versions old or older.*trainer\.window=3 trainer\.too_old=mask, or more"):
        loose.check_resumable(strict, "runs/a")
    with pytest.raises(ConfigError, match=r"resume with trainer\.mode=colocate_async trainer\.staleness=2, or more"):
        strict.check_resumable(schedule("sync"), "runs/a")
