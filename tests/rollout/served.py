"""Engines in workers, for the tests: what their processes make."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.rollout.fake import FakeEngine
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.remote import EngineWorker
from tandem.runtime.placement import Rank
from tandem.weights import Room, WeightBlock, WeightShard, nowhere
from tests.rollout.tiny import decoder, text

SLOTS = 3
VOCABULARY = 40
MAX_CONTEXT = 512
MANY = 400  # more tokens than any test waits for
STEP_S = 0.004


class SharedWeights:
    """The engine reads the trainer's storage already."""

    shared = True
    blocks: tuple[WeightBlock, ...] = ()

    def shards(self, room: Room = nowhere) -> Iterator[WeightShard]:
        raise AssertionError("shared weights have nothing to move")


def fake_engine(slots: int = SLOTS) -> FakeEngine:
    """Ten distinct tokens over and over, not the same for two prompts."""
    return _fake(FakeEngine, slots)


class _Slow(FakeEngine):
    """So that a request is still under way when what is asked after it has come."""

    def _step(self) -> None:
        time.sleep(STEP_S)
        super()._step()


def _fake(kind: type[FakeEngine], slots: int) -> FakeEngine:
    return kind(
        lambda p: [(sum(p) + i) % 10 for i in range(MANY)],
        slots=slots,
        vocab_size=VOCABULARY,
        max_context=MAX_CONTEXT,
        text=text,
    )


def slow(rank: Rank, slots: int) -> EngineWorker:
    del rank
    return EngineWorker(_fake(_Slow, slots))


def native(rank: Rank, seed: int, config: dict[str, Any], pid: Path) -> EngineWorker:
    """With the weights of `tiny.decoder(seed=seed)`. pid: a file for the number of this process."""
    del rank
    pid.write_text(str(os.getpid()))
    return EngineWorker(NativeEngine(decoder(seed=seed), text, NativeConfig(**config), exact=True))
