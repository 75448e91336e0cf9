"""A writer and a reader in processes of their own: what is read is one version, or it is said that it is not."""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.connection import Connection

import pytest
import torch

from tandem.checkpoint.shared_memory import MemoryReader, MemorySender, SharedMemory
from tandem.errors import EngineError
from tandem.weights import OpenedWeights, WeightShard
from tests.forks import FORKS

SIZE = 1 << 16
TOTAL = 100


def pieces(number: int) -> list[WeightShard]:
    return [WeightShard(name, (SIZE,), (0,), torch.full((SIZE,), float(number))) for name in ("first", "second")]


def write(end: Connection, *, waits: bool) -> None:
    """Numbers from 1 on, each after the reader has said that it has the one before, or as fast as it can."""
    sender = MemorySender(0, [piece.block for piece in pieces(0)])
    end.send(sender.opened.at)
    for number in range(1, TOTAL + 1):
        sender.send(number, pieces(number), lambda _place, _part: None)
        if waits or number == 1:
            end.send(number)
            end.recv()
    end.send(0)
    end.recv()


def read(reader: MemoryReader, number: int, pause_s: float) -> tuple[list[float], list[float]]:
    """The smallest and the largest number of each weight."""
    least, most = list[float](), list[float]()
    for piece in reader.source(number).shards():
        assert isinstance(piece, WeightShard)
        seen = piece.tensor.clone()
        time.sleep(pause_s)
        least.append(float(seen.min()))
        most.append(float(seen.max()))
    return least, most


def started(waits: bool) -> tuple[mp.process.BaseProcess, Connection, MemoryReader]:
    here, there = mp.Pipe()
    process = FORKS.Process(target=write, args=(there,), kwargs={"waits": waits}, daemon=True)
    process.start()
    return process, here, MemoryReader((here.recv(),))


def test_a_reader_that_is_waited_for_reads_whole_versions_and_may_keep_them_until_the_next() -> None:
    process, end, reader = started(waits=True)
    kept: list[WeightShard] = []
    for _ in range(TOTAL):
        number = end.recv()
        for piece in kept:  # of the version before, used where it lies
            assert (float(piece.tensor.min()), float(piece.tensor.max())) == (number - 1, number - 1)
        assert read(reader, number, 0) == ([number] * 2, [number] * 2)
        kept = [piece for piece in reader.source(number).shards() if isinstance(piece, WeightShard)]
        end.send(None)
    assert end.recv() == 0
    end.send(None)
    process.join(10)


def test_a_reader_that_is_not_waited_for_is_told_and_never_takes_two_versions_for_one() -> None:
    process, end, reader = started(waits=False)
    assert end.recv() == 1
    end.send(None)
    told = 0
    for number in [number for number in range(1, TOTAL + 1) for _ in range(3)]:
        try:
            found = read(reader, number, 0.0005)
        except EngineError:
            told += 1
        else:
            assert found == ([number] * 2, [number] * 2)
    assert told
    while end.recv() != 0:
        pass
    assert read(reader, TOTAL, 0) == ([TOTAL] * 2, [TOTAL] * 2)
    end.send(None)
    process.join(10)


def test_memory_of_another_machine_is_refused() -> None:
    transport = SharedMemory()
    transport.outlet(1)
    with pytest.raises(EngineError, match=r"rank 0 of the trainer is on another machine.*choose checkpoint=collective"):
        transport.readers([OpenedWeights("elsewhere", (), "1 1 1 1")])
