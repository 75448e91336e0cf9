"""Several engines as one: who samples what, and that nobody can see who did; the port's laws are in contracts/."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import device
from tandem.checkpoint.collective import Collective
from tandem.checkpoint.publisher import CheckpointConfig, Publisher
from tandem.checkpoint.shared_memory import SharedMemory
from tandem.checkpoint.transport import Transport
from tandem.device import Hardware
from tandem.errors import EngineError, WorkerError
from tandem.ports import Collect, Dispatch, RolloutEngine, WeightSource, register
from tandem.queue.memory import MemoryQueue
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.remote import EngineWorker, RemoteEngine
from tandem.rollout.router import Router
from tandem.runtime.inline import InlineGroup
from tandem.runtime.placement import Beside, Rank, ResourcePool, place
from tandem.runtime.process import Processes
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.workers import ModelWorker
from tandem.types import Chunk, GenerateRequest, PolicyRef
from tests.rollout.served import SharedWeights
from tests.rollout.tiny import Answer, answer, answers, decoder, engine, request, text

CONFIG: dict[str, Any] = {"slots": 4, "max_context": 128, "chunk_tokens": 4}
LIMITS: dict[str, Any] = {"vocab_size": 61, "max_context": 128, "capabilities": frozenset({"batch_invariant", "exact"})}
MODEL = decoder()
PROMPTS = [(1, 2, 3, 4), (9, 8), (5,), (7, 7, 7, 7, 7)]


class Admitting:
    """Who is admitted, as a test says."""

    def __init__(self, *engines: RolloutEngine) -> None:
        self.admitted: Sequence[RolloutEngine] = engines


class Noted(NativeEngine):
    """Notes what it is asked."""

    def __init__(self, **config: Any) -> None:
        super().__init__(MODEL, text, NativeConfig(**{**CONFIG, **config}), exact=True)
        self.asked: list[GenerateRequest] = []

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.asked.append(request)
        return super().generate(request)


def routed(*engines: RolloutEngine) -> tuple[Router, Admitting]:
    router, admission = Router(**LIMITS), Admitting(*engines)
    router.serve(engines, admission)
    return router, admission


def asked(groups: int = 4, members: int = 4, **params: Any) -> list[GenerateRequest]:
    return [
        request(i, PROMPTS[i % 4], member=j, **{"max_tokens": 15 + 5 * j, "temperature": 0.7 + 0.1 * i, **params})
        for i in range(groups)
        for j in range(members)
    ]


def alone(requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Of one engine that nobody disturbs."""
    return asyncio.run(answers(engine(MODEL, **CONFIG), requests))


async def until(condition: Callable[[], bool], pause_s: float = 0) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(pause_s)
    raise AssertionError("it did not come about")


def facts(got: Sequence[Answer]) -> list[tuple[list[int], list[float], str | None]]:
    """Where chunks end is nobody's business."""
    return [(each.tokens, each.logprobs, each.stop) for each in got]


def test_the_samples_are_those_of_one_engine_and_a_group_is_on_one() -> None:
    first, second = Noted(), Noted()
    router, _ = routed(first, second)
    assert facts(asyncio.run(answers(router, asked()))) == facts(alone(asked()))
    groups = [{one.key.group for one in each.asked} for each in (first, second)]
    assert not groups[0] & groups[1]
    assert [len(each.asked) for each in (first, second)] == [8, 8]
    for each in (first, second):  # the prompt of a group is computed once; where others run, its last token is decoded
        prompts = {one.key.group: len(one.tokens) for one in each.asked}
        assert each.metrics()["prefill_tokens"].value == sum(prompts.values()) - (len(prompts) - 1)


def test_a_request_goes_to_the_engine_with_the_fewest() -> None:
    first, second = Noted(slots=8), Noted(slots=8)
    router, _ = routed(first, second)

    async def scene() -> None:
        long = [asyncio.create_task(answer(router, one)) for one in asked(2, 3, max_tokens=100)]
        await asyncio.sleep(0)
        await asyncio.gather(*(answer(router, one) for one in [request(5, (1,), max_tokens=1), request(6, (1,), max_tokens=1)]))
        assert [[one.key.ordinal for one in each.asked] for each in (first, second)] == [[0, 0, 0, 5], [1, 1, 1, 6]]
        await asyncio.gather(*long)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_requests_leave_an_engine_that_is_left_out_and_come_back_when_it_is_admitted_again() -> None:
    first, second = Noted(), Noted()
    router, admission = routed(first, second)
    undisturbed = facts(alone(asked(4, 2, max_tokens=60)))

    async def scene() -> None:
        got = [Answer([], [], []) for _ in range(8)]
        running = [
            asyncio.create_task(answer(router, one, into)) for one, into in zip(asked(4, 2, max_tokens=60), got, strict=True)
        ]
        await until(lambda: all(one.tokens for one in got))
        before = len(first.asked)
        admission.admitted = [second]
        router.look()
        await asyncio.gather(*running)
        assert facts(got) == undisturbed
        assert len(first.asked) == before
        continued = [one for one in second.asked if one.sampled]
        assert continued
        assert {one.key for one in continued} <= {one.key for one in first.asked}
        assert router.look()["rollout/moved_requests"].value == before
        admission.admitted = [first, second]
        router.look()
        await answers(router, asked(2, 2))
        assert len(first.asked) > before

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_while_weights_are_handed_out_new_requests_wait_and_running_ones_stay() -> None:
    first, second = Noted(), Noted()
    router, admission = routed(first, second)

    async def scene() -> None:
        running = [asyncio.create_task(answer(router, one)) for one in asked(2, 2, max_tokens=60)]
        await until(lambda: len(first.asked) + len(second.asked) == 4)
        admission.admitted = []
        late = asyncio.create_task(answer(router, request(9, (1, 2), max_tokens=9)))
        await asyncio.gather(*running)
        assert not late.done()
        assert len(first.asked) + len(second.asked) == 4
        admission.admitted = [second]
        router.look()
        assert (await late).stop == "length"
        assert len(second.asked) == 3

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("how", ["abort", "deadline", "close"])
def test_a_request_that_waits_for_an_engine_can_end(how: str) -> None:
    router, admission = routed(engine(MODEL, **CONFIG))
    admission.admitted = []

    async def scene() -> None:
        one = GenerateRequest(request(0, (1,)).key, (1,), request(0, (1,), max_tokens=9).params, 3, deadline_s=0.05)
        waiting = asyncio.create_task(answer(router, one if how == "deadline" else request(0, (1,), max_tokens=9)))
        await asyncio.sleep(0)
        if how != "deadline":
            await (router.abort([one.key]) if how == "abort" else router.close())
        assert (await waiting).stop == "abort"

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_an_engine_that_is_lent_takes_its_share_and_gives_it_back() -> None:
    """Groups that have not begun move first, whole; nothing is sampled there before and after; samples are the undisturbed ones."""
    own, lent = Noted(), Noted()
    router, admission = Router(**LIMITS), Admitting(own, lent)
    router.serve([own], admission, [lent])
    requests = asked(8, 4, max_tokens=60)
    undisturbed = facts(alone(requests))

    async def scene() -> None:
        assert router.num_own == 1
        await lent.pause()
        got = [Answer([], [], []) for _ in requests]
        running = [asyncio.create_task(answer(router, one, into)) for one, into in zip(requests, got, strict=True)]
        await until(lambda: any(one.tokens for one in got))
        assert not lent.asked
        await router.lend()
        await until(lambda: len(lent.asked) == 16)
        assert {one.key.ordinal for one in lent.asked} == {1, 2, 3, 4}, "those that run stay, as long as others wait"
        await until(lambda: sum(len(one.tokens) for one in got[4:]) > 20)
        await router.take_back()
        still = asyncio.create_task(answer(lent, request(99, (1, 2), max_tokens=4)))
        steps = lent.metrics()["steps"].value
        await asyncio.gather(*running)
        assert lent.metrics()["steps"].value == 0
        assert steps > 0
        assert facts(got) == undisturbed
        sampled, again = router.account()
        assert 20 < sampled < 16 * 60
        continued = [one for one in own.asked if one.sampled]
        assert again == sum(len(one.tokens) for one in continued)
        assert 0 < len(continued) <= 4, "those that had not begun cost nothing"
        await router.take_back()
        assert router.account() == (0, 0)
        await lent.resume()
        assert (await still).stop == "length"

    asyncio.run(asyncio.wait_for(scene(), 60))


# --------------------------------------------------------------------------------------------------- in processes


@asynccontextmanager
async def serving(logs: Path, num: int = 2) -> AsyncGenerator[tuple[Processes, list[RemoteEngine]]]:
    """Native engines with other weights than MODEL's, each in a process of a pool of its own."""
    pools = [ResourcePool(f"rollout-{number}", 1) for number in range(num)]
    runtime = Processes(place(pools, Hardware(num)), logs, limit_s=30, spare=[pool.name for pool in pools])
    groups = [
        runtime.group(pool.name, pool.name, "tests.rollout.served:native", 1, CONFIG, logs / f"{pool.name}.pid") for pool in pools
    ]
    async with runtime:
        yield runtime, [RemoteEngine(group, **LIMITS) for group in groups]


def kill(logs: Path, number: int) -> None:
    os.kill(int((logs / f"rollout-{number}.pid").read_text()), signal.SIGKILL)


def publisher(
    router: Router, transport: Transport | None = None, returned: Callable[[], Sequence[RolloutEngine]] = tuple
) -> Publisher:
    transports, probe = [transport or SharedMemory()], [[1, 2, 3], [4, 5]]
    return Publisher(transports, CheckpointConfig(limit_s=20), probe, router.look, returned=returned)


def trainer() -> InlineGroup:
    return InlineGroup([ModelWorker(TorchEngine(MODEL, TrainConfig()), MemoryQueue())])


async def under_way(router: Router, requests: Sequence[GenerateRequest]) -> tuple[list[Answer], list[asyncio.Task[Answer]]]:
    """What is said of requests of which 200 tokens are there, and who gathers it."""
    got = [Answer([], [], []) for _ in requests]
    running = [asyncio.create_task(answer(router, one, into)) for one, into in zip(requests, got, strict=True)]
    await until(lambda: sum(len(one.tokens) for one in got) > 200, 0.001)
    return got, running


def test_the_samples_are_the_same_when_an_engine_is_killed_while_it_generates(tmp_path: Path) -> None:
    requests = asked(4, 4, max_tokens=80)
    undisturbed = facts(alone(requests))

    async def scene() -> None:
        async with serving(tmp_path) as (_, engines):
            router = Router(**LIMITS)
            checkpoint = publisher(router)
            router.serve(engines, checkpoint)
            await checkpoint.connect(trainer(), engines)
            await checkpoint.publish(PolicyRef())
            got, running = await under_way(router, requests)
            kill(tmp_path, 1)
            await asyncio.gather(*running)
            assert facts(got) == undisturbed
            metrics = await checkpoint.publish(PolicyRef(version=1))
            assert metrics["publish/left_out"].value == 1
            assert metrics["rollout/moved_requests"].value > 0
            assert list(checkpoint.admitted) == engines[:1]
            await answers(router, requests[:2])
            kill(tmp_path, 0)
            with pytest.raises(EngineError, match=r"no rollout engine is left to sample it: .*killed by SIGKILL"):
                await answer(router, requests[0])
            await router.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("transport", [SharedMemory, lambda: Collective("127.0.0.1", device.select("cpu"), 1 << 14, limit_s=20)])
def test_an_engine_that_was_killed_is_sampled_from_again_with_the_weights_of_the_next_publish(
    transport: Callable[[], Transport], busy: bool, tmp_path: Path
) -> None:
    """And not before, when nobody had asked it for anything since; the samples are the undisturbed ones."""
    requests = asked(4, 4, max_tokens=80)
    undisturbed = facts(alone(requests))

    async def scene() -> None:
        async with serving(tmp_path) as (runtime, engines):

            def returned() -> list[RemoteEngine]:
                there = [engines[int(name.removeprefix("rollout-"))] for name in runtime.returned()]
                for each in there:
                    each.begin_again()
                return there

            router = Router(**LIMITS)
            checkpoint = publisher(router, transport(), returned)
            router.serve(engines, checkpoint)
            await checkpoint.connect(trainer(), engines)
            await checkpoint.publish(PolicyRef())
            got, running = await under_way(router, requests)
            if not busy:
                await asyncio.gather(*running)
            kill(tmp_path, 1)
            await asyncio.gather(*running)
            await until(lambda: bool(runtime._coming), 0.001)
            await asyncio.wait(runtime._coming.values())
            assert facts(await answers(router, requests)) == undisturbed
            with pytest.raises(WorkerError, match="killed by SIGKILL"):
                await engines[1].resume()
            metrics = await checkpoint.publish(PolicyRef(version=1))
            assert metrics["publish/came_back"].value == 1
            assert metrics["publish/left_out"].value == 0
            assert list(checkpoint.admitted) == engines
            assert engines[1].policy == PolicyRef(version=1)
            kill(tmp_path, 0)  # what follows can only come from the new one
            await until(lambda: bool(runtime._coming), 0.001)
            assert facts(await answers(router, requests)) == undisturbed
            assert facts(got) == undisturbed
            await router.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


class Deaf(NativeEngine):
    """Does not take new weights while `deaf`."""

    deaf = True

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        if self.deaf:
            raise EngineError("not now")
        await super().load_weights(source, policy)


def test_an_engine_that_took_no_weights_gets_no_requests_until_it_takes_some() -> None:
    deaf, other = Deaf(decoder(seed=1), text, NativeConfig(**CONFIG), exact=True), engine(decoder(seed=2), **CONFIG)
    router = Router(**LIMITS)
    checkpoint = publisher(router)
    router.serve([deaf, other], checkpoint)
    undisturbed = facts(alone(asked()))

    async def scene() -> None:
        await checkpoint.connect(trainer(), [deaf, other])
        await checkpoint.publish(PolicyRef(version=1))
        assert facts(await answers(router, asked())) == undisturbed
        assert deaf.metrics()["steps"].value == 0
        deaf.deaf = False
        version = 1
        while deaf not in checkpoint.admitted:  # it is offered weights after ever more publishes
            version += 1
            await checkpoint.publish(PolicyRef(version=version))
        assert version <= 5
        assert facts(await answers(router, asked())) == undisturbed
        assert deaf.metrics()["steps"].value > 0

    asyncio.run(asyncio.wait_for(scene(), 60))


class Trained:
    """As a policy's worker has its model, in a process: the worker beside it is given this one."""

    def __init__(self, rank: Rank) -> None:
        del rank
        self.model = decoder()

    @register(Dispatch.BROADCAST, Collect.FIRST)
    async def train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter[::2] += 0.01


def beside(rank: Rank, trained: Trained) -> EngineWorker:
    del rank
    return EngineWorker(engine(trained.model, **CONFIG))


def test_an_engine_beside_a_trainer_samples_with_the_weights_that_are_trained(tmp_path: Path) -> None:
    """Nothing is sent; what older weights computed is dropped when it is told of new ones."""
    trained = Trained(Rank(0, 1))
    runtime = Processes(place([ResourcePool("trainer", 1)], Hardware(1)), tmp_path, limit_s=20)
    policy = runtime.group("policy", "trainer", "tests.rollout.test_router:Trained")
    lent = RemoteEngine(runtime.group("lent", "trainer", "tests.rollout.test_router:beside", Beside("policy")), **LIMITS)

    async def scene() -> None:
        async with runtime:
            for version in range(1, 3):
                await policy.call(Trained.train)
                await trained.train()
                await lent.load_weights(SharedWeights(), PolicyRef(version=version))
                here = NativeEngine(trained.model, text, NativeConfig(**CONFIG), exact=True, policy=lent.policy)
                assert await answers(lent, asked(2, 2)) == await answers(here, asked(2, 2))
            await lent.close()

    asyncio.run(asyncio.wait_for(scene(), 30))
