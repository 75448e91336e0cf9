"""What it costs to bring weights to engines, beside one copy of the same bytes, a bare broadcast, and a slow link.

    python benchmarks/weight_sync.py   # the last line is JSON; exits with 1 where a ratio is above its limit or below its floor

What is timed is what `publish` calls: a rank's encoding, hash and sender, and in processes of their own the readers' source, their
copy where they keep one, and their hash; not the logprobs of the probe, which depend on a model. Wall time decides, from the first
byte that is touched to the last reader's answer; CPU seconds are those of all processes. All sides take turns, and the ratio is the
median of the rounds'.

    copy        torch's copy of one flat tensor, in this process. Readers of shared memory use the bytes where they lie
    broadcast   gloo's broadcast of flat buckets of the same size, two on their way, into one flat tensor; our reader copies
                each piece to where its weights are
    full        everything over the same link of 1 Gbit/s, against the delta of one optimiser step. The link is paced in user
                space: the sender sleeps before each bucket for as long as the link would take. Both ends hash

The steps are real ones, of TorchEngine on a decoder of 27 million parameters and of random tokens; its float32 masters are sent in
bfloat16. To have the size asked for, the model's weights are sent as many times over, under other names. `changed` is the fraction
of numbers whose bfloat16 bits a step changed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from lines import publish, row, within
from torch import Tensor
from train import MIDDLE, batch, training_step

from tandem import device
from tandem.checkpoint import collective
from tandem.checkpoint.collective import Collective
from tandem.checkpoint.encoding import Full
from tandem.checkpoint.rank import RankWeights
from tandem.checkpoint.shared_memory import SharedMemory
from tandem.checkpoint.transport import Reader, Sender, Transport
from tandem.models.decoder import init_decoder
from tandem.rollout.weights import room, scatter, wire_hash
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.weights import BlockHash, SentWeights, WeightBlock, WeightLayout, WeightShard, WeightSpec, nowhere

WIRE, WIDTH, TENSORS, BUCKET_BYTES, LIMIT_S = torch.bfloat16, 1024, 288, 16 << 20, 120.0
LINK_BYTES_S = 1e9 / 8
LEARNING_RATES = (1e-6, 1e-5)

Weights = Mapping[str, Tensor]


def some_weights(nbytes: int) -> dict[str, Tensor]:
    """Float32 masters that are so many bytes in bfloat16: an embedding of a quarter, and equal matrices."""
    rows = nbytes // (2 * WIDTH)
    each = (rows - rows // 4) // TENSORS
    sizes = {"embed": rows - each * TENSORS, **{f"layers.{i}": each for i in range(TENSORS)}}
    return {name: torch.randn(size, WIDTH) for name, size in sizes.items()}


@dataclass(frozen=True)
class Trainer:
    """Implements rank.Holder."""

    held: Weights

    def layout(self) -> WeightLayout:
        return WeightLayout(
            tuple(WeightSpec(name, tuple(each.shape), str(each.dtype), wire=WIRE) for name, each in self.held.items())
        )

    def weight_shards(self) -> Iterator[WeightShard]:
        for name, tensor in self.held.items():
            yield WeightShard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


# ----------------------------------------------------------------------------------------------- other processes

Do = Callable[[Any], Any]


def _serve(end: Connection, make: Callable[[], Do]) -> None:
    torch.set_num_threads(1)
    do = make()
    while (job := end.recv()) is not None:
        began = time.process_time()
        done = do(job)
        end.send((time.process_time() - began, done))


class Elsewhere:
    """Does jobs in a process of its own, with what `make` makes there. Use as a context."""

    def __init__(self, make: Callable[[], Do]) -> None:
        self._end, there = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=_serve, args=(there, make), daemon=True)
        self._process.start()
        there.close()

    def tell(self, job: Any) -> None:
        self._end.send(job)

    def answer(self) -> tuple[float, Any]:
        """CPU seconds there, and what was answered."""
        return self._end.recv()

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.send(None)
        self._process.join(30)


def reading(reader: Reader, blocks: Sequence[WeightBlock], *, aliases: bool) -> Do:
    """An engine's part in a publish, of job (number, whether to hash): the hash of what it then holds, or nothing."""
    held = {} if aliases else {block.name: torch.zeros(block.size, dtype=block.dtype) for block in blocks}

    def do(job: tuple[int, bool]) -> str:
        number, hashed = job
        for piece in reader.source(number).shards(nowhere if aliases else room(held)):
            if isinstance(piece, WeightShard) and aliases:
                held[piece.name] = piece.tensor
            else:
                scatter(piece, held[piece.block.name])
        return wire_hash(held, blocks) if hashed else ""

    return do


def in_buckets(flat: Tensor) -> None:
    """The bare broadcast, on either side."""
    under_way: deque[Any] = deque()
    for bucket in flat.split(BUCKET_BYTES // flat.element_size()):
        if len(under_way) == 2:
            under_way.popleft().wait()
        under_way.append(dist.broadcast(bucket, 0, async_op=True))
    for work in under_way:
        work.wait()


def receiving(address: device.Address, numel: int) -> Do:
    device.join(device.select("cpu"), 1, 2, address, LIMIT_S)
    flat = torch.zeros(numel, dtype=WIRE)
    return lambda _: in_buckets(flat)


# ------------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True, slots=True)
class Took:
    wall_s: float
    cpu_s: float


def timed(send: Callable[[], object], others: Sequence[Elsewhere] = (), job: Any = None, *, meets: bool = False) -> Took:
    """From the first byte here to the last answer there, which has to be the hash that was sent where both are hashed."""
    began, spent = time.perf_counter(), time.process_time()
    for other in others if meets else ():
        other.tell(job)
    sent = send()
    for other in () if meets else others:
        other.tell(job)
    answers = [other.answer() for other in others]
    took = Took(time.perf_counter() - began, time.process_time() - spent + sum(cpu for cpu, _ in answers))
    if isinstance(sent, SentWeights):
        assert {answer for _, answer in answers} == {sent.wire_hash}, "an engine holds other bits"
    return took


def told(ours: Sequence[Took], peers: Sequence[Took]) -> dict[str, Any]:
    """What a row says beside its ratio."""

    def median(of: Sequence[Took], name: str) -> float:
        return round(statistics.median(getattr(each, name) for each in of), 3)

    seconds = {name: median(ours, name) for name in ("wall_s", "cpu_s")}
    return seconds | {f"peer_{name}": median(peers, name) for name in seconds}


def at_most(case: str, against: str, ours: Sequence[Took], peers: Sequence[Took], limit: float) -> dict[str, Any]:
    ratios = [mine.wall_s / theirs.wall_s for mine, theirs in zip(ours, peers, strict=True)]
    return within(case, against, ratios, limit, **told(ours, peers))


@dataclass
class Publishing:
    """A transport with one rank here and engines elsewhere, opened as `connect` does. Use `stack` to end the engines."""

    transport: Transport
    trainer: Trainer
    readers: int
    stack: ExitStack

    def __post_init__(self) -> None:
        outlet = self.transport.outlet(self.readers)
        self.rank, self._number = RankWeights(self.trainer), 0

        def kept(index: int, blocks: Sequence[WeightBlock]) -> Sender:
            self._sender = outlet(index, blocks)
            return self._sender

        opened = self.rank.open(kept)
        assert opened is not None
        self._blocks = opened.blocks
        self.engines = [
            self.stack.enter_context(Elsewhere(partial(reading, reader, opened.blocks, aliases=not self.transport.meets)))
            for reader in self.transport.readers([opened])
        ]
        self.stack.callback(self.transport.close)
        self.stack.callback(self.rank.close)

    def send(self, held: Weights, readers: int = 1) -> Took:
        """Without hashes: encoded and sent, read there."""
        self._number += 1
        encoding = Full()

        def send() -> int:
            pieces = [encoding.encode(block, held[block.name], True, BlockHash(block)) for block in self._blocks]
            return self._sender.send(self._number, pieces, lambda _place, _part: None)

        return timed(send, self.engines[:readers], (self._number, False), meets=self.transport.meets)

    def publish(self, readers: int = 1, *, delta: bool = False) -> Took:
        """With hashes on both ends."""
        self._number += 1
        send = self.rank.send(self._number, delta=delta, whole=False)
        return timed(lambda: asyncio.run(send), self.engines[:readers], (self._number, True), meets=self.transport.meets)


# --------------------------------------------------------------------------------------------------------- rows


def on_one_machine(nbytes: int, rounds: int) -> list[dict[str, Any]]:
    masters = some_weights(nbytes)
    held = {name: tensor.to(WIRE) for name, tensor in masters.items()}
    flat = torch.cat([tensor.view(-1) for tensor in held.values()])
    target = torch.zeros_like(flat)
    with ExitStack() as stack:
        ours = Publishing(SharedMemory(), Trainer(held), 2, stack)
        sides: dict[str, Callable[[], Took]] = {
            "copy": lambda: timed(lambda: target.copy_(flat)),
            "one": lambda: ours.send(held, 1),
            "two": lambda: ours.send(held, 2),
            "one, hashed": lambda: ours.publish(1),
            "two, hashed": lambda: ours.publish(2),
            "masters": lambda: ours.send(masters, 1),
        }
        took = by_turns(sides, rounds)
    copies = took["copy"]
    return [
        at_most("shared_memory, one reader", "copy", took["one"], copies, 1.25),
        at_most("shared_memory, two readers", "copy", took["two"], copies, 1.25),
        at_most("shared_memory, one reader, hashed on both ends", "copy", took["one, hashed"], copies, 2),
        at_most("shared_memory, two readers, hashed on both ends", "copy", took["two, hashed"], copies, 2),
        at_most("shared_memory, float32 masters cast on their way", "copy", took["masters"], copies, 2),
    ]


def by_turns(sides: Mapping[str, Callable[[], Took]], rounds: int) -> dict[str, list[Took]]:
    """Each side's rounds; two more before, so that all memory is there."""
    turns = [{name: side() for name, side in sides.items()} for _ in range(2 + rounds)][2:]
    return {name: [turn[name] for turn in turns] for name in sides}


def over_gloo(nbytes: int, rounds: int) -> dict[str, Any]:
    held = {name: tensor.to(WIRE) for name, tensor in some_weights(nbytes).items()}
    flat = torch.cat([tensor.view(-1) for tensor in held.values()])
    store = device.open_store("127.0.0.1", LIMIT_S)
    address = device.Address("127.0.0.1", store.port)
    with ExitStack() as stack:
        peer = stack.enter_context(Elsewhere(partial(receiving, address, flat.numel())))
        device.join(device.select("cpu"), 0, 2, address, LIMIT_S)
        stack.callback(dist.destroy_process_group)
        ours = Publishing(Collective("127.0.0.1", device.select("cpu"), BUCKET_BYTES, LIMIT_S), Trainer(held), 1, stack)
        sides = {"bare": lambda: timed(lambda: in_buckets(flat), [peer], 0, meets=True), "ours": lambda: ours.send(held)}
        took = by_turns(sides, rounds)
    return at_most("collective, one reader", "broadcast", took["ours"], took["bare"], 1.2)


class Paced(device.Broadcasts):
    """Over a link of LINK_BYTES_S: what is sent leaves when the link would have carried it."""

    _free_s = 0.0

    def start(self, tensor: Tensor) -> Callable[[], None]:
        self._free_s = max(self._free_s, time.monotonic()) + tensor.nbytes / LINK_BYTES_S
        time.sleep(max(0.0, self._free_s - time.monotonic()))
        return super().start(tensor)


def steps(rate: float, count: int) -> list[dict[str, Tensor]]:
    """The masters before and after each of `count` optimiser steps, after one that is not looked at."""
    of, seen = TorchEngine(init_decoder(MIDDLE, 0, WIRE), TrainConfig(lr=rate)), list[dict[str, Tensor]]()
    for seed in range(count + 1):
        training_step(of, batch(8, 32, MIDDLE.vocab_size, seed=seed))
        seen.append({shard.name: shard.tensor.detach().clone() for shard in of.weight_shards()})
    return seen


def changed(seen: Sequence[Weights]) -> float:
    """The median step's fraction."""
    fractions = [
        sum(int((old[name].to(WIRE) != new[name].to(WIRE)).sum()) for name in new) / sum(each.numel() for each in new.values())
        for old, new in pairwise(seen)
    ]
    return statistics.median(fractions)


def over_a_link(nbytes: int, rounds: int, rate: float) -> dict[str, Any]:
    seen = steps(rate, 2 + rounds)
    times = max(1, round(nbytes / sum(2 * tensor.numel() for tensor in seen[0].values())))
    held = {f"{i}.{name}": tensor.clone() for i in range(times) for name, tensor in seen[0].items()}
    coming = iter(seen[1:])

    def stepped() -> Took:
        """Not timed: the next step's weights are there."""
        for name, tensor in next(coming).items():
            for i in range(times):
                held[f"{i}.{name}"].copy_(tensor)
        return Took(0, 0)

    with ExitStack() as stack:
        stack.enter_context(patch.object(collective, "Broadcasts", Paced))
        full, delta = (
            Publishing(Collective("127.0.0.1", device.select("cpu"), BUCKET_BYTES, LIMIT_S), Trainer(held), 1, stack)
            for _ in range(2)
        )
        took = by_turns({"step": stepped, "full": full.publish, "delta": lambda: delta.publish(delta=True)}, rounds)
    ratios = [a.wall_s / b.wall_s for a, b in zip(took["full"], took["delta"], strict=True)]
    case = f"delta of a step at lr {rate:g}, collective over 1 Gbit/s"
    return row(case, "full", ratios, 5, 10, changed=round(changed(seen), 4), **told(took["delta"], took["full"]))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--mb", type=int, default=500, help="megabytes of bfloat16 weights")
    options.add_argument("--rounds", type=int, default=5, help="of each side, after two to warm up")
    given = options.parse_args()
    if min(given.mb, given.rounds) < 1:
        options.error("--mb and --rounds must be at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nbytes = given.mb * 10**6
    rows = [*on_one_machine(nbytes, given.rounds), over_gloo(nbytes, given.rounds)]
    rows += [over_a_link(nbytes, given.rounds, rate) for rate in LEARNING_RATES]
    return publish("weight_sync", rows)


if __name__ == "__main__":
    sys.exit(main())
