"""Who is admitted: engines that fail are tried again, left out, and admitted again at a full publish; and what auto chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from tandem.checkpoint.collective import Collective
from tandem.checkpoint.disk import Disk
from tandem.checkpoint.fake import FakeWeightWorker
from tandem.checkpoint.publisher import CheckpointConfig, Publisher, _Costs  # pyright: ignore[reportPrivateUsage]
from tandem.errors import EngineError, WorkerError
from tandem.ports import Held, WeightSource
from tandem.runtime.inline import InlineGroup
from tandem.types import PolicyRef
from tandem.weights import WeightBlock
from tests.contracts.test_checkpoint_engine import (
    PROBE,
    TRANSPORTS,
    HalfWorker,
    Rollout,
    Weights,
    publisher,
    some_weights,
    update,
    zeros,
)


class Moody(Rollout):
    """Fails the loads whose numbers are given, counted from 1; `loads` counts all."""

    def __init__(self, weights: Weights, fails: Sequence[int]) -> None:
        super().__init__(weights)
        self._fails = fails
        self.loads = 0

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        self.loads += 1
        if self.loads in self._fails:
            raise WorkerError("the engine cannot be reached")
        await super().load_weights(source, policy)


def admitted(name: str, path: Path, fails: Sequence[int], publishes: int, encoding: str = "full", **config: object) -> list[bool]:
    """Of a moody engine beside a good one, after each publish; the good one is always admitted, and both hold what they say."""

    async def scenario() -> list[bool]:
        trainer = FakeWeightWorker(some_weights(), copies=True)
        good, moody, found = Rollout(zeros(trainer)), Moody(zeros(trainer), fails), list[bool]()
        async with aclosing(publisher(TRANSPORTS[name](path), encoding, **config)) as engine:
            await engine.connect(InlineGroup([trainer]), [good, moody])
            for version in range(1, publishes + 1):
                metrics = await engine.publish(PolicyRef(version=version))
                assert good in engine.admitted
                found.append(moody in engine.admitted)
                assert metrics["publish/left_out"].value == 1 - found[-1]
                for each in engine.admitted:
                    assert isinstance(each, Rollout)
                    assert all(each.weights[weight].equal(trainer.held[weight]) for weight in trainer.held)
                update(trainer)
        return found

    return asyncio.run(scenario())


@pytest.mark.parametrize("name", ["shared_memory", "disk"])
def test_an_engine_is_tried_again_left_out_and_admitted_again(name: str, tmp_path: Path) -> None:
    assert admitted(name, tmp_path, [2], 3) == [True, True, True]
    assert admitted(name, tmp_path, [2, 3], 3) == [True, False, True]
    assert admitted(name, tmp_path, [2, 3, 4, 5], 6) == [True, False, False, False, False, True]


def test_one_that_was_left_out_waits_for_a_publish_of_everything(tmp_path: Path) -> None:
    assert admitted("shared_memory", tmp_path, [2, 3], 5, "delta", full_every=4) == [True, False, False, False, True]


def test_a_directory_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    place = tmp_path / "weights"
    sender = Disk(place, 64).outlet(1)(0, [WeightBlock("w", (2,), (0,), (2,), torch.float32)])
    place.write_text("a file")
    with pytest.raises(
        EngineError, match=rf"weights cannot be written to {place}/weights-000001: .*choose another checkpoint\.directory"
    ):
        sender.send(1, [], lambda _place, _part: None)


def test_nobody_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=True)
        async with aclosing(publisher(TRANSPORTS["disk"](tmp_path))) as engine:
            await engine.connect(InlineGroup([trainer]), [Moody(zeros(trainer), [1, 2])])
            await engine.publish(PolicyRef(version=1))

    with pytest.raises(
        EngineError, match=r"no rollout engine holds policy@0\.1: engine 0: WorkerError: the engine cannot be reached"
    ):
        asyncio.run(scenario())


def test_delta_needs_the_whole_model_in_one_rank() -> None:
    async def scenario() -> None:
        held = some_weights()
        engine = publisher(TRANSPORTS["shared_memory"](Path()), "delta")
        await engine.connect(InlineGroup([HalfWorker(held, index) for index in range(2)]), [])

    with pytest.raises(EngineError, match=r"delta compares whole weights in one process, and 2 ranks hold parts.*delta_sharded"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "in_place", "encoding": "delta"}, "encoding=delta with name=in_place: nothing is sent there"),
        ({"directory": Path("x")}, "directory=x is for name=disk, and name is auto"),
        ({"bucket_mb": 0}, "bucket_mb must be at least 1, got 0"),
        ({"limit_s": 0.0}, "limit_s must be above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**config)  # type: ignore[arg-type]


def test_auto_takes_what_took_less_time_and_measures_again() -> None:
    def chosen(full_s: float, delta_s: float) -> list[bool]:
        costs, found = _Costs("auto", 8), list[bool]()
        for number in [*range(8)] * 2:
            found.append(costs.delta(number))
            costs.took(number, found[-1], delta_s if found[-1] else full_s)
        return found

    assert chosen(2, 1) == [False, False, True, True, True, True, True, True] * 2
    assert chosen(1, 2) == [False, False, True, True, False, False, False, False] * 2


class Watched(Rollout):
    """Says what it was asked in order; with weights that are not those that were sent, where it is `wrong`."""

    def __init__(self, weights: Weights, *, wrong: bool) -> None:
        super().__init__(weights)
        self.asked: list[str] = []
        self._wrong = wrong

    async def pause(self) -> None:
        self.asked.append("pause")

    async def resume(self) -> None:
        self.asked.append("resume")

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        self.asked.append("load")
        await super().load_weights(source, policy)
        if self._wrong:
            self.weights["norm"][0] += 1

    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held:
        self.asked.append("held")
        return await super().held(blocks, rows)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_engine_stands_still_until_it_has_shown_that_it_holds_what_was_sent(name: str, tmp_path: Path) -> None:
    """And longer, if it does not."""

    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=True)
        right, wrong = (Watched(zeros(trainer), wrong=each) for each in (False, True))
        async with aclosing(publisher(TRANSPORTS[name](tmp_path))) as engine:
            await engine.connect(InlineGroup([trainer]), [right, wrong])
            await engine.publish(PolicyRef(version=1))
            assert engine.admitted == (right,)
            assert right.asked == ["pause", "load", "held", "resume"]
            assert wrong.asked == ["pause", "load", "held"] * 2

    asyncio.run(scenario())


def test_an_engine_that_is_gone_is_not_waited_for_where_all_meet(tmp_path: Path) -> None:
    class Gone(Rollout):
        async def pause(self) -> None:
            raise WorkerError("its process was killed")

    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=True)
        good, gone = Rollout(zeros(trainer)), Gone(zeros(trainer))
        async with aclosing(publisher(TRANSPORTS["collective"](tmp_path))) as engine:
            await engine.connect(InlineGroup([trainer]), [good, gone])
            for version in range(1, 4):
                await asyncio.wait_for(engine.publish(PolicyRef(version=version)), 10)  # a meeting waits 30 s
                assert engine.admitted == (good,)
                assert all(good.weights[weight].equal(trainer.held[weight]) for weight in trainer.held)
                update(trainer)

    asyncio.run(scenario())


def lent_beside(path: Path, name: str, *, wrong: bool) -> tuple[list[bool], list[str]]:
    """Whether an engine beside the trainer is admitted after each publish, and all that it was asked."""

    async def scenario() -> tuple[list[bool], list[str]]:
        trainer = FakeWeightWorker(some_weights(), copies=True)
        own, found = Rollout(zeros(trainer)), list[bool]()
        lent = Watched({"other": torch.ones(3)} if wrong else trainer.held, wrong=False)
        config = CheckpointConfig(limit_s=30)
        async with aclosing(Publisher([TRANSPORTS[name](path)], config, PROBE, beside=[lent])) as engine:
            await engine.connect(InlineGroup([trainer]), [own, lent])
            for version in range(1, 4):
                metrics = await engine.publish(PolicyRef(version=version))
                assert own in engine.admitted
                assert metrics["publish/sent_frac"].value == 1
                found.append(lent in engine.admitted)
                update(trainer)
        return found, lent.asked

    return asyncio.run(scenario())


@pytest.mark.parametrize("name", TRANSPORTS)
def test_to_an_engine_beside_the_trainer_nothing_is_sent_and_it_is_not_told_to_go_on(name: str, tmp_path: Path) -> None:
    assert lent_beside(tmp_path, name, wrong=False) == ([True] * 3, ["load", "held", "load", "load"])
    assert lent_beside(tmp_path, name, wrong=True) == ([False] * 3, ["load", "held"] * 3)


def test_engines_beside_the_trainer_are_not_enough(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=True)
        own, lent = Moody(zeros(trainer), [1, 2]), Rollout(trainer.held)
        async with aclosing(Publisher([TRANSPORTS["disk"](tmp_path)], CheckpointConfig(), PROBE, beside=[lent])) as engine:
            await engine.connect(InlineGroup([trainer]), [own, lent])
            with pytest.raises(EngineError, match=r"no rollout engine holds policy@0\.1: engine 0: .*cannot be reached"):
                await engine.publish(PolicyRef(version=1))

    asyncio.run(scenario())


class Mortal(Watched):
    """Cannot be reached while it is `gone`."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, wrong=False)
        self.gone = False

    async def pause(self) -> None:
        if self.gone:
            raise WorkerError("its process was killed")
        await super().pause()

    def begin_again(self, weights: Weights) -> None:
        self.weights, self.policy, self.gone, self.asked = weights, PolicyRef(), False, []


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("encoding", ["full", "delta", "auto"])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_engine_that_is_there_again_is_given_everything_by_the_next_publish(
    name: str, encoding: str, noticed: bool, tmp_path: Path
) -> None:
    """However often it was tried while it was gone, and also where no publish has noticed that it was; the other one goes on."""

    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=True)
        good, mortal, back = Rollout(zeros(trainer)), Mortal(zeros(trainer)), list[Mortal]()
        config = CheckpointConfig(encoding=encoding, limit_s=30)  # type: ignore[arg-type]

        def returned() -> list[Mortal]:
            found = back[:]
            back.clear()
            return found

        transport = TRANSPORTS[name](tmp_path)
        async with aclosing(Publisher([transport], config, PROBE, returned=returned)) as engine:
            await engine.connect(InlineGroup([trainer]), [good, mortal])
            for version in range(1, 10):
                mortal.gone = noticed and version in (4, 5, 6)
                if version == 7:
                    mortal.begin_again(zeros(trainer))
                    back.append(mortal)
                metrics = await engine.publish(PolicyRef(version=version))
                assert engine.admitted == ((good,) if mortal.gone else (good, mortal))
                assert metrics["publish/came_back"].value == (version == 7)
                assert metrics["publish/left_out"].value == mortal.gone
                if version == 7:
                    assert metrics["publish/sent_frac"].value == 1
                    assert mortal.asked == ["pause", "load", "held", "resume"]
                for each in engine.admitted:
                    assert isinstance(each, Rollout)
                    assert all(each.weights[weight].equal(trainer.held[weight]) for weight in trainer.held)
                update(trainer)
            assert metrics["publish/delta"].value == (encoding == "delta") or encoding == "auto"
            if isinstance(transport, Collective):
                assert transport._sets == (3 if noticed else 2), "the new process is in none of the old one's groups"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_one_that_is_there_again_and_does_not_agree_has_not_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=True)
        good, wrong = Rollout(zeros(trainer)), Watched(zeros(trainer), wrong=True)
        returned = iter([[], [wrong]])
        transport = TRANSPORTS["disk"](tmp_path)
        async with aclosing(Publisher([transport], CheckpointConfig(), PROBE, returned=lambda: next(returned))) as engine:
            await engine.connect(InlineGroup([trainer]), [good, wrong])
            for version in (1, 2):
                metrics = await engine.publish(PolicyRef(version=version))
                assert engine.admitted == (good,)
                assert metrics["publish/came_back"].value == 0
                assert metrics["publish/left_out"].value == 1

    asyncio.run(scenario())


def test_what_auto_has_measured_is_not_what_a_publish_took_that_sent_everything_for_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = FakeWeightWorker(some_weights(), copies=True)
        rollout, there = Rollout(zeros(trainer)), list[Rollout]()
        config = CheckpointConfig(encoding="auto")
        async with aclosing(Publisher([TRANSPORTS["disk"](tmp_path)], config, PROBE, returned=lambda: there)) as engine:
            await engine.connect(InlineGroup([trainer]), [rollout])
            for version in range(1, 5):
                there = [rollout] if version == 4 else []  # the one whose time is a delta's
                metrics = await engine.publish(PolicyRef(version=version))
            assert metrics["publish/delta"].value == 1
            assert engine._costs.seconds.keys() == {False}

    asyncio.run(scenario())
