"""The hand-over of a device: what lies there, in what order sides leave and come, and that what moved is what it was.

No accelerator is asked for. `Arena` stands for one: memory of this machine that is counted as it is allotted and given back, so
that the ledger's account can be held against what was really there.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.device import CPU, Device, Kind
from tandem.errors import EngineError
from tandem.ports import Place
from tandem.queue.fake import FakeQueue
from tandem.rollout.fake import FakeEngine
from tandem.runtime.inline import InlineGroup
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.handover import Ledger, Side, hand_over
from tandem.trainer.workers import ModelWorker
from tests.train.rows import make_rows, tiny_decoder

SFT = loss_ref(configure("sft"))
POLICY = frozenset({"policy"})


@dataclass(frozen=True)
class Arena(Device):
    """A device whose memory is counted. live: bytes by address. peak: of all at once, since it was set."""

    kind: Kind = "cuda"
    live: dict[int, int] = field(default_factory=dict[int, int])
    peak: list[int] = field(default_factory=lambda: [0])

    @property
    def used(self) -> int:
        return sum(self.live.values())

    def empty(self, like: Tensor) -> Tensor:
        memory = np.empty(max(like.nbytes, 1), np.uint8)
        address = memory.ctypes.data
        self.live[address] = like.nbytes
        weakref.finalize(memory, self.live.pop, address)
        self.peak[0] = max(self.peak[0], self.used)
        return torch.from_numpy(memory)[: like.nbytes].view(like.dtype).view(like.shape)

    def moved(self, tensor: Tensor, where: Place) -> Tensor:
        here = tensor.untyped_storage().data_ptr() in self.live
        if here == (where == "device"):
            return tensor
        return self.empty(tensor).copy_(tensor) if where == "device" else tensor.clone()

    def held_bytes(self, tensors: Iterable[Tensor]) -> int:
        return sum(self.live[address] for address in {each.untyped_storage().data_ptr() for each in tensors} & self.live.keys())


class Rollout(FakeEngine):
    """Its cache, and its own weights where it has some, are in an arena. events: what it was asked, in order."""

    def __init__(self, arena: Arena, cache: int, weights: int = 0) -> None:
        super().__init__([1])
        self.events: list[str] = []
        self.own = torch.arange(weights, dtype=torch.int64)
        self._arena, self._cache_bytes = arena, cache
        self._cache: list[Tensor] = []

    def fill(self) -> None:
        """As generation does."""
        self._cache = [self._arena.empty(torch.empty(self._cache_bytes, dtype=torch.uint8))]

    async def pause(self) -> None:
        self.events.append("pause")
        await super().pause()

    async def resume(self) -> None:
        self.events.append("resume")
        await super().resume()

    async def place(self, where: Place) -> Mapping[str, int]:
        self.events.append(where)
        await super().place(where)
        self.own = self._arena.moved(self.own, where)
        if where == "host":
            self._cache = []
        return self.there()

    def there(self) -> Mapping[str, int]:
        return {"KV cache": self._arena.held_bytes(self._cache), "weights": self._arena.held_bytes([self.own])}


def train(engine: TorchEngine, seed: int) -> None:
    engine.forward_backward(make_rows([4, 7, 3], seed), SFT)
    engine.step()


def trainer(home: Device = CPU, seed: int = 0) -> TorchEngine:
    """One that has taken a step, so that there are moments; on its device."""
    engine = TorchEngine(tiny_decoder(seed), TrainConfig(lr=0.01), home=home)
    train(engine, 0)
    engine.place("device")
    return engine


def group(engine: TorchEngine) -> InlineGroup:
    return InlineGroup([ModelWorker(engine, FakeQueue())])


def sizes(engine: TorchEngine) -> tuple[int, int]:
    """Bytes of weights, with what follows from the shape, and of AdamW's moments and counts."""
    parameters = list(engine.decoder.parameters())
    weights = sum(each.nbytes for each in (*parameters, *engine.decoder.buffers()))
    return weights, sum(2 * each.nbytes + 4 for each in parameters)


def handed(
    side: Side, trainers: Mapping[str, TorchEngine], rollout: Rollout, arena: Arena, *, lent: frozenset[str] = POLICY
) -> Ledger:
    """What one hand-over did by the ledger, which is what the arena has seen."""
    before = arena.peak[0] = arena.used
    groups = {role: group(engine) for role, engine in trainers.items()}
    ledger = asyncio.run(hand_over(side, groups, [rollout], lent=lent))
    assert (ledger.before, ledger.peak, ledger.after) == (before, arena.peak[0], arena.used)
    return ledger


def test_what_lies_on_the_device_before_while_and_after() -> None:
    """With the policy's weights read in place, and a critic that nobody reads."""
    arena = Arena()
    trainers = {"policy": trainer(arena), "critic": trainer(arena, 1)}
    rollout, (weights, moments) = Rollout(arena, cache=1 << 20), sizes(trainers["policy"])
    assert arena.used == 2 * (weights + moments)

    began = handed("rollout", trainers, rollout, arena)
    assert (began.before, began.peak, began.after) == (2 * (weights + moments), 2 * (weights + moments), weights)
    rollout.fill()
    to_training = handed("training", trainers, rollout, arena)
    assert to_training.totals == [weights + (1 << 20), weights, weights + moments, 2 * (weights + moments)]
    assert to_training.held["critic"] == {"weights": weights, "optimizer": moments}
    for engine in trainers.values():
        train(engine, 1)
    to_rollout = handed("rollout", trainers, rollout, arena)
    assert to_rollout.totals == [2 * (weights + moments), 2 * weights + moments, weights, weights]
    assert rollout.events == ["host", "device", "resume", "pause", "device", "host", "host", "device", "resume"]


def test_sides_with_weights_of_their_own_are_never_there_together() -> None:
    arena = Arena()
    policy = {"policy": trainer(arena)}
    held, nobody = sum(sizes(policy["policy"])), frozenset[str]()
    rollout = Rollout(arena, cache=3 * held, weights=100)
    handed("rollout", policy, rollout, arena, lent=nobody)
    assert arena.used == 800
    rollout.fill()
    assert handed("training", policy, rollout, arena, lent=nobody).totals == [3 * held + 800, 0, held]
    assert handed("rollout", policy, rollout, arena, lent=nobody).totals == [held, 0, 800]
    assert torch.equal(rollout.own, torch.arange(100))


@pytest.mark.parametrize("lent", [POLICY, frozenset[str]()], ids=["shared weights", "own weights"])
def test_training_goes_on_bit_for_bit(lent: frozenset[str]) -> None:
    arena = Arena()
    moving, still = trainer(arena), trainer()
    parameters, rollout = list(moving.decoder.parameters()), Rollout(arena, cache=64)
    for seed in range(1, 4):
        handed("rollout", {"policy": moving}, rollout, arena, lent=lent)
        rollout.fill()
        handed("training", {"policy": moving}, rollout, arena, lent=lent)
        for engine in (moving, still):
            train(engine, seed)
    assert all(a is b for a, b in zip(parameters, moving.decoder.parameters(), strict=True))
    assert_same_state(moving, still)


def assert_same_state(one: TorchEngine, other: TorchEngine) -> None:
    for mine, theirs in zip(one._state()[:2], other._state()[:2], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_the_state_is_the_same_on_the_host_and_nothing_is_computed_there() -> None:
    arena = Arena()
    engine, still = trainer(arena), trainer()
    engine.place("host")
    assert arena.used == 0
    assert_same_state(engine, still)
    for refused in (lambda: train(engine, 1), engine.step, lambda: engine.forward(make_rows([3], 1), frozenset({"logprobs"}))):
        with pytest.raises(EngineError, match="the engine is on the host and computes on the device"):
            refused()


def test_on_the_cpu_nothing_moves() -> None:
    engine, rollout = trainer(), FakeEngine([1])
    places = [tensor.data_ptr() for part in engine._state()[:2] for tensor in part.values()]

    async def there_and_back() -> list[Ledger]:
        sides: list[Side] = ["rollout", "training", "rollout"]
        return [await hand_over(side, {"policy": group(engine)}, [rollout], lent=POLICY) for side in sides]

    assert [ledger.peak for ledger in asyncio.run(there_and_back())] == [0, 0, 0]
    assert places == [tensor.data_ptr() for part in engine._state()[:2] for tensor in part.values()]
    tensor = torch.zeros(3)
    assert CPU.moved(tensor, "device") is CPU.moved(tensor, "host") is tensor
    assert CPU.held_bytes([tensor]) == 0 == Device("cuda").held_bytes([tensor])


def test_a_pending_gradient_is_not_left_behind() -> None:
    arena = Arena()
    engine = trainer(arena)
    engine.forward_backward(make_rows([3], 1), SFT)
    with pytest.raises(EngineError, match="a gradient is pending and would stay on the device: step first"):
        handed("rollout", {"policy": engine}, Rollout(arena, cache=1), arena)


class Stays(Rollout):
    async def place(self, where: Place) -> Mapping[str, int]:
        """Forgets its cache."""
        return self.there()


def test_who_does_not_leave_is_named_with_its_bytes() -> None:
    arena = Arena()
    rollout = Stays(arena, cache=1000)
    rollout.fill()
    with pytest.raises(EngineError, match=r"rollout engine 0 was sent to the host, and left 1000 bytes of KV cache on the device"):
        handed("training", {"policy": trainer(arena)}, rollout, arena)


def test_a_peak_above_both_ends_is_an_error() -> None:
    """As it would be where who comes does not wait for who leaves."""
    ledger = Ledger({"policy": {"optimizer": 300}, "rollout engine 0": {}})
    ledger.note("rollout engine 0", {"KV cache": 500})
    ledger.note("policy", {"optimizer": 0})
    with pytest.raises(EngineError, match=r"held 800 bytes on the device at once, and 500 at its ends: \[300, 800, 500\]"):
        ledger.check({})
