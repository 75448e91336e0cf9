"""The one CheckpointEngine: any transport, any encoding, and the handshake by which an engine is admitted.

    publish:  ranks encode and send -> engines load -> hashes and probe logprobs of both ends -> engines that agree are admitted

Where weights move an engine stands still from before it loads until it has shown that it holds what was sent, so that nothing is
sampled from anything else. One that cannot be reached, or that holds something else, is tried again; then it is left out, so that
nothing may be sampled from it, and offered everything at a later full publish. To one that lives in a new process, since its own
has died, the next publish sends everything. Where nobody is left, that is an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.checkpoint.in_place import NothingToMove
from tandem.checkpoint.transport import Reader, Transport
from tandem.data_proto import DataProto
from tandem.errors import EngineError, TandemError
from tandem.ports import RolloutEngine, WeightWorker, WorkerGroup
from tandem.types import Key, Metric, Metrics, PolicyRef
from tandem.weights import OpenedWeights, SentWeights

_FAILURES = (TandemError, OSError, RuntimeError)  # of an engine, on its way or there
_TRIES = 2
_LONGEST_S = 365 * 86_400.0


@dataclass(frozen=True)
class CheckpointConfig:
    """How weights come from the trainer to the engines that generate.

    name: in_place, both read the same memory; shared_memory, of one machine; collective, over torch.distributed; disk, through
    files. encoding: full, everything each time; delta, what changed since the last publish, found where the whole model is held;
    delta_sharded, found by each rank in what it holds. auto: what fits, and of encodings what has taken less time. bucket_mb: how
    much is on its way at once, by collective and disk. full_every: publishes after which a delta sends everything again, and auto
    measures again. limit_s: how long an engine may take to load. directory: for disk, seen by trainer and engines; by default in
    the run's directory.
    """

    SHORTHAND: ClassVar[str] = "name"

    name: Literal["auto", "in_place", "shared_memory", "collective", "disk"] = "auto"
    encoding: Literal["auto", "full", "delta", "delta_sharded"] = "auto"
    bucket_mb: int = 16
    full_every: int = 50
    limit_s: float = 120.0
    directory: Path | None = None

    def __post_init__(self) -> None:
        for name in ("bucket_mb", "full_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.limit_s <= _LONGEST_S:
            raise ValueError(f"limit_s must be above 0 and at most {_LONGEST_S:g} (a year), got {self.limit_s}")
        if self.name == "in_place" and self.encoding.startswith("delta"):
            raise ValueError(f"encoding={self.encoding} with name=in_place: nothing is sent there, so leave encoding out")
        if self.directory is not None and self.name != "disk":
            raise ValueError(f"directory={self.directory} is for name=disk, and name is {self.name}")


@dataclass(eq=False)
class _Target:
    """A rollout engine. reads: it is a trainer's, and reads the weights where they are. agreed: it has
    shown what it holds. failures: since it was admitted last; again: the publish at which it is offered weights again.
    """

    number: int
    engine: RolloutEngine
    reads: bool = False
    reader: Reader | None = None
    admitted: bool = False
    agreed: bool = False
    failures: int = 0
    again: int = 0
    why: str = ""
    gap: float = 0.0


@dataclass
class _Costs:
    """Which encoding a publish has, by what earlier ones took; number: counted from 0 within `every` publishes.

    auto: two full ones, of which the second counts, then two deltas, of which again the second counts, then the cheaper.
    """

    encoding: str
    every: int
    seconds: dict[bool, float] = field(default_factory=dict[bool, float])  # by whether it was a delta

    def delta(self, number: int) -> bool:
        if self.encoding != "auto":
            return self.encoding != "full"
        return number in (2, 3) or (number > 3 and self.seconds.get(True, 0) < self.seconds.get(False, 0))

    def took(self, number: int, delta: bool, seconds: float) -> None:
        if number not in (0, 2):
            self.seconds[delta] = seconds


class Publisher:
    """Implements ports.CheckpointEngine.

    transports: to be tried in this order, the first that reaches everybody is used. probe: rows of tokens, of two at least, of
    which both ends tell the logprobs. told: called when a publish has decided who is admitted; its metrics are the publish's too.
    beside: engines in the process of the trainer's only rank, on its own model, which stand still during a publish: to them nothing
    is sent, and what they predict is compared once. returned: asked as a publish begins for engines that were gone and are there
    again since it was asked last, and hold nothing.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        config: CheckpointConfig,
        probe: Sequence[Sequence[int]],
        told: Callable[[], Metrics] = Metrics,
        beside: Sequence[RolloutEngine] = (),
        returned: Callable[[], Collection[RolloutEngine]] = tuple,
    ) -> None:
        self._transports, self._config, self._told, self._beside = tuple(transports), config, told, tuple(beside)
        self._returned = returned
        self._probe = tuple(map(tuple, probe))
        self._rows = _rows(self._probe)
        self._costs = _Costs(config.encoding, config.full_every)
        self._train: WorkerGroup | None = None
        self._targets: list[_Target] = []
        self._opened: list[OpenedWeights] = []
        self._number = 0
        self._last: tuple[PolicyRef, tuple[str, ...]] | None = None

    @property
    def admitted(self) -> tuple[RolloutEngine, ...]:
        """The engines that hold what was published last, which are those that may be sampled from."""
        return tuple(target.engine for target in self._targets if target.admitted)

    @property
    def transport(self) -> str:
        """The name of the one in use."""
        return self._transport.name

    async def connect(self, train: WorkerGroup, rollouts: Sequence[RolloutEngine]) -> None:
        """Raises EngineError where no transport reaches everybody, or the encoding does not fit the ranks."""
        self._train = train
        self._targets = [_Target(number, engine, engine in self._beside) for number, engine in enumerate(rollouts)]
        for transport in self._transports:
            self._transport = transport
            try:
                await self._open(self._targets)
                break
            except EngineError:
                if transport is self._transports[-1]:
                    raise
        if self._config.encoding == "delta" and len(self._opened) > 1:
            raise EngineError(
                f"checkpoint.encoding=delta compares whole weights in one process, and {len(self._opened)} ranks hold parts of "
                "them: choose delta_sharded"
            )

    async def publish(self, policy: PolicyRef) -> Metrics:
        """Metrics, all publish/...: bytes and time_s; sent_frac, of all bytes; delta, 0 or 1; left_out, how many engines;
        came_back, how many that had been gone; changed, 0 or 1, where another policy was published before; probe_gap, the largest
        difference of a logprob, where weights moved. Without engines nothing moves.
        """
        if self._train is None:
            raise EngineError(f"publishing {policy} before connect(train, rollouts)")
        start = time.perf_counter()
        if not self._targets and self._transport.moves:
            return Metrics.sum({"publish/bytes": 0, "publish/time_s": 0.0})
        turn = self._number % self._config.full_every
        delta = self._costs.delta(turn) if self._transport.far or self._config.encoding != "auto" else False
        new = self._new()
        sent = await self._hand_out(policy, delta=delta, whole=not delta or turn == 0 or bool(new))
        if self._none_left and delta:
            sent = await self._hand_out(policy, delta=delta, whole=True)
        if self._none_left:
            raise EngineError(
                f"no rollout engine holds {policy}: " + "; ".join(f"engine {each.number}: {each.why}" for each in self._targets)
            )
        seconds = time.perf_counter() - start
        if not new:
            self._costs.took(turn, delta, seconds)
        before, self._last = self._last, (policy, tuple(each.wire_hash for each in sent))
        metrics = Metrics.mean({"publish/delta": float(delta)})
        if self._transport.moves:
            metrics += Metrics.mean(
                {"publish/sent_frac": sum(each.num_bytes for each in sent) / sum(each.whole_bytes for each in sent)}
            )
            metrics += Metrics({"publish/probe_gap": Metric(max(each.gap for each in self._targets), 1.0, "max")})
        if before is not None and before[0] != policy:
            metrics += Metrics.mean({"publish/changed": float(before[1] != self._last[1])})
        left_out = len(self._targets) - len(self.admitted)
        came_back = sum(each.admitted for each in new)
        moved = sum(each.num_bytes for each in sent)
        metrics += Metrics.sum({"publish/bytes": moved, "publish/time_s": seconds})
        return metrics + Metrics.sum({"publish/left_out": left_out, "publish/came_back": came_back}) + self._told()

    async def aclose(self) -> None:
        for transport in self._transports:
            transport.close()

    # ---------------------------------------------------------------------------------------------------- one publish

    async def _open(self, targets: Sequence[_Target]) -> None:
        """Senders in all ranks, for these readers."""
        assert self._train is not None
        sent = [target for target in targets if not target.reads]
        outlet = self._transport.outlet(len(sent))
        opened = await self._train.call_each(WeightWorker.open_weights, outlet)
        self._opened = [each for each in opened if each is not None]
        for target in self._targets:
            target.reader = NothingToMove(self._opened[0].blocks) if target.reads else None
        for target, reader in zip(sent, self._transport.readers(self._opened), strict=True):
            target.reader = reader

    def _new(self) -> list[_Target]:
        """Engines that are there again, and that nothing was offered yet."""
        there = self._returned()
        new = [each for each in self._targets if any(each.engine is engine for engine in there)]
        for each in new:
            each.failures = each.again = 0
            if self._transport.meets:
                each.reader = None  # its place in the group was the old process's
        return new

    @property
    def _none_left(self) -> bool:
        """Whether no engine that is there all the time is admitted."""
        own = [each for each in self._targets if not each.reads]
        return bool(own) and not any(each.admitted for each in own)

    async def _hand_out(self, policy: PolicyRef, *, delta: bool, whole: bool) -> list[SentWeights]:
        """To the engines that are admitted, and of a whole publish to others whose turn has come. What the ranks sent."""
        self._number += 1
        due = [each for each in self._targets if not each.reads and (each.admitted or (whole and each.again <= self._number))]
        for each in self._targets:
            each.admitted = False
        if not self._transport.meets:
            sent = await self._send(delta, whole)
            ours = await self._logprobs()
            for _ in range(_TRIES):
                tried = [each for each in due if not each.admitted]
                await asyncio.gather(*(self._admit(each, policy, sent, ours) for each in tried))
        else:
            sent = await self._meet(due, policy, delta=delta, whole=whole)
            for each in due:
                if not each.admitted:  # alone, so that it holds up no other
                    sent = await self._meet([each], policy, delta=delta, whole=True) or sent
        for each in self._targets:
            if each.reads and await self._load(each, policy):
                await self._agree(each, (), [] if each.agreed else await self._logprobs())
        for each in due:
            each.failures = 0 if each.admitted else each.failures + 1
            each.again = self._number + 2**each.failures - 1
        return sent

    async def _meet(self, due: Sequence[_Target], policy: PolicyRef, *, delta: bool, whole: bool) -> list[SentWeights]:
        """Sends while these engines load, and no others. Nothing where that failed."""
        due = [each for each, fine in zip(due, await asyncio.gather(*map(self._halt, due)), strict=True) if fine]
        if not due:
            return []
        if [each for each in self._targets if each.reader is not None and not each.reads] != due:
            await self._open(due)
        sending = asyncio.create_task(self._send(delta, whole), name="send weights")
        loaded = await asyncio.gather(*(self._load(each, policy) for each in due))
        try:
            sent = await sending
        except _FAILURES as error:
            for each in due:
                each.reader, each.why = None, each.why or _said(error)
            return []
        ours = await self._logprobs()
        for each, fine in zip(due, loaded, strict=True):
            if fine:
                await self._agree(each, sent, ours)
            else:
                each.reader = None  # its group is broken
        return sent

    async def _send(self, delta: bool, whole: bool) -> list[SentWeights]:
        assert self._train is not None
        sent = await self._train.call_each(WeightWorker.send_weights, self._number, delta, whole)
        return [each for each in sent if each is not None]

    async def _logprobs(self) -> list[NDArray[np.float32]]:
        """Of the probe's tokens from the second on, as the trainer has them."""
        assert self._train is not None
        if not self._checks:
            return []
        found = await self._train.call(WeightWorker.logprobs, self._rows)
        logprobs = cast("NDArray[np.float32]", found["logprobs"].numpy())
        return [row[1:] for row in np.split(logprobs, np.cumsum([len(row) for row in self._probe])[:-1])]

    @property
    def _checks(self) -> bool:
        """Whether engines have to show what they hold: where nothing moves, once."""
        return bool(self._targets) and (self._transport.moves or self._number == 1)

    async def _admit(
        self, target: _Target, policy: PolicyRef, sent: Sequence[SentWeights], ours: Sequence[NDArray[np.float32]]
    ) -> None:
        if await self._halt(target) and await self._load(target, policy):
            await self._agree(target, sent, ours)

    async def _halt(self, target: _Target) -> bool:
        """Whether the engine stands still now; where nothing moves it need not."""
        return not self._transport.moves or await self._heard(target, target.engine.pause())

    async def _heard(self, target: _Target, call: Awaitable[None]) -> bool:
        """Whether the engine did as it was told."""
        try:
            await asyncio.wait_for(call, self._config.limit_s)
        except _FAILURES as error:
            target.why = _said(error)
            return False
        return True

    async def _load(self, target: _Target, policy: PolicyRef) -> bool:
        """Whether the engine says that it has this policy."""
        assert target.reader is not None
        try:
            load = target.engine.load_weights(target.reader.source(self._number), policy)
            await asyncio.wait_for(load, self._config.limit_s)
        except _FAILURES as error:
            late = f"it did not load them in checkpoint.limit_s={self._config.limit_s:g} s"
            target.why = late if isinstance(error, TimeoutError) and not str(error) else _said(error)
            return False
        if target.engine.policy != policy:
            target.why = f"it says {target.engine.policy} after {policy} was published to it"
            return False
        return True

    async def _agree(self, target: _Target, sent: Sequence[SentWeights], ours: Sequence[NDArray[np.float32]]) -> None:
        """Admits the engine if it holds what was sent, and predicts what the trainer does."""
        if not self._checks or (target.reads and target.agreed):
            target.admitted = True
            return
        blocks = [] if target.reads else [each.blocks for each in self._opened]
        try:
            held = await asyncio.wait_for(target.engine.held(blocks, self._probe), self._config.limit_s)
        except _FAILURES as error:
            target.why = _said(error)
            return
        for rank, (one, other) in enumerate(zip(held.wire_hashes, sent, strict=True)):
            if one != other.wire_hash:
                target.why = f"the weights of rank {rank} have hash {other.wire_hash} there and {one} in the engine"
                return
        target.gap = max(float(np.abs(one - other).max()) for one, other in zip(held.logprobs, ours, strict=True))
        if not target.gap <= held.tolerance:
            target.why = (
                f"it holds the trainer's weights and its logprobs differ from the trainer's by {target.gap:.2g}, where it declares "
                f"{held.tolerance:g}: does it keep something that older weights computed?"
            )
            return
        target.agreed = True
        target.admitted = target.reads or await self._heard(target, target.engine.resume())


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _rows(tokens: Sequence[Sequence[int]]) -> DataProto:
    """As a TrainEngine takes them: all but the first token of each row counts."""
    mask = [place > 0 for row in tokens for place in range(len(row))]
    return DataProto.make(
        [Key("probe", number) for number in range(len(tokens))],
        [len(row) for row in tokens],
        token={"tokens": torch.tensor([token for row in tokens for token in row]), "mask": torch.tensor(mask)},
        row={"temperature": torch.ones(len(tokens))},
    )
