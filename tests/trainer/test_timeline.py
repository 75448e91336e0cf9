"""Timeline: how long generation stood still, on a clock of the test's own."""

from __future__ import annotations

from contextlib import ExitStack

from tandem.track.trace import Span
from tandem.trainer.timeline import Timeline
from tandem.types import GroupKey


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_generation_works_while_any_episode_is_under_way_and_nothing_holds_it() -> None:
    clock = Clock()
    timeline, (first, second) = Timeline(clock), (GroupKey("train", ordinal) for ordinal in (0, 1))

    def passes(seconds: float) -> None:
        clock.now_s += seconds

    passes(1)  # idle
    with ExitStack() as one:
        one.enter_context(timeline.sampling(first))
        passes(2)
        with timeline.sampling(second):
            passes(4)
        with timeline.judging(second):
            passes(8)
        with timeline.held():
            passes(16)  # idle
        passes(32)
        spans, idle_s = timeline.take()
        assert idle_s == 17
        passes(64)
    with timeline.judging(first):
        passes(128)  # idle
    assert spans == (
        *(Span("groups", "sample train:1", 103, 107), Span("groups", "judge train:1", 107, 115)),
        *(Span("generation", "generate", 101, 115), Span("generation", "generate", 131, 163)),
    )
    spans, idle_s = timeline.take()
    assert idle_s == 128
    assert spans == (
        Span("generation", "generate", 163, 227),
        *(Span("groups", "sample train:0", 101, 227), Span("groups", "judge train:0", 227, 355)),
    )
    assert timeline.take() == ((), 0.0)
