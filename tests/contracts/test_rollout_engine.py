"""The laws of ports.RolloutEngine, for the native engine and the fake, here and in workers, alone and behind a router.

Behind a router two engines have the slots of one between them.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tandem.device import Hardware
from tandem.errors import EngineError
from tandem.models.decoder import init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.ports import RolloutEngine, Runtime, WorkerGroup
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.remote import EngineWorker, RemoteEngine
from tandem.rollout.router import Router
from tandem.runtime.inline import InlineGroup
from tandem.runtime.placement import ResourcePool, place
from tandem.runtime.process import Processes
from tandem.runtime.ray import RayCluster
from tandem.types import Chunk, GenerateRequest, Key, PolicyRef, SamplingParams, Stop
from tests.rollout.served import MANY, MAX_CONTEXT, SLOTS, STEP_S, VOCABULARY, SharedWeights, fake_engine
from tests.rollout.tiny import text as characters
from tests.runtime.ray_cluster import cluster

SHAPE = DecoderConfig(
    vocab_size=40, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=512
)
POOL = ResourcePool("rollout", ranks=1)
LONG = 80  # tokens, so that a request is under way when it is disturbed


class Here:
    """An engine under test in this process, a fresh one each time."""

    step_s = 0.0  # of an engine whose steps do not wait for this process

    def __init__(self, make: Callable[[], RolloutEngine]) -> None:
        self._make = make

    def run(self, scene: Callable[[RolloutEngine], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            await scene(self._make())

        asyncio.run(main())

    def close(self) -> None: ...


class Elsewhere:
    """In a worker, which is started once and has an engine for each test, or several of these slots behind a router; all calls come
    from one event loop.
    """

    step_s = STEP_S

    def __init__(self, make: Callable[[Path], Runtime], slots: Sequence[int] = (SLOTS,)) -> None:
        self._make, self._slots = make, slots
        self._open = ExitStack()

    @cached_property
    def _started(self) -> tuple[asyncio.Runner, Iterator[WorkerGroup]]:
        runtime = self._make(Path(self._open.enter_context(TemporaryDirectory())))
        groups = [
            runtime.group(f"rollout {number}", POOL.name, "tests.rollout.served:slow", slots)
            for number, slots in enumerate(list(self._slots) * 50)
        ]
        runner = self._open.enter_context(asyncio.Runner())
        runner.run(runtime.__aenter__())
        self._open.callback(lambda: runner.run(runtime.__aexit__(None, None, None)))
        return runner, iter(groups)

    def run(self, scene: Callable[[RolloutEngine], Coroutine[Any, Any, None]]) -> None:
        runner, groups = self._started
        engines = [over(next(groups)) for _ in self._slots]
        runner.run(scene(engines[0] if len(engines) == 1 else before(*engines)))

    def close(self) -> None:
        self._open.close()


def over(group: WorkerGroup) -> RemoteEngine:
    return RemoteEngine(group, vocab_size=VOCABULARY, max_context=MAX_CONTEXT, capabilities=frozenset({"batch_invariant"}))


@dataclass(frozen=True)
class All:
    """Of these engines each is admitted."""

    admitted: Sequence[RolloutEngine]


def before(*engines: RolloutEngine) -> Router:
    router = Router(vocab_size=VOCABULARY, max_context=MAX_CONTEXT, capabilities=frozenset({"batch_invariant"}))
    router.serve(engines, All(engines))
    return router


def native_engine(slots: int = SLOTS) -> RolloutEngine:
    config = NativeConfig(slots=slots, max_context=MAX_CONTEXT, chunk_tokens=4)
    return NativeEngine(init_decoder(SHAPE, 0), characters, config, exact=True)


def ray_cluster(logs: Path) -> Runtime:
    cluster()
    return RayCluster([POOL], logs, limit_s=20)


Adapter = Here | Elsewhere
MAKERS: dict[str, Callable[[], Adapter]] = {
    "native": lambda: Here(native_engine),
    "fake": lambda: Here(fake_engine),
    "native in a worker": lambda: Here(lambda: over(InlineGroup([EngineWorker(native_engine())]))),
    "natives behind a router": lambda: Here(lambda: before(native_engine(2), native_engine(1))),
    "fakes in a process behind a router": lambda: Elsewhere(
        lambda logs: Processes(place([POOL], Hardware(1)), logs, limit_s=20), (2, 1)
    ),
    "fake in a process": lambda: Elsewhere(lambda logs: Processes(place([POOL], Hardware(1)), logs, limit_s=20)),
    "fake in an actor": lambda: Elsewhere(ray_cluster),
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.ray] if "actor" in name else []) for name in MAKERS])
def adapter(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    with closing(MAKERS[request.param]()) as made:
        yield made


def request(ordinal: int = 0, *, tokens: tuple[int, ...] = (1, 2, 3), max_tokens: int = 12, **named: Any) -> GenerateRequest:
    fields = {name: named.pop(name) for name in ("sampled", "deadline_s", "adapter", "min_policy", "extra") if name in named}
    return GenerateRequest(Key("t", ordinal), tokens, SamplingParams(max_tokens=max_tokens, **named), seed=5, **fields)


class Consumer:
    """Iterates a request in a task of its own and keeps its chunks."""

    def __init__(self, engine: RolloutEngine, asked: GenerateRequest) -> None:
        self.chunks: list[Chunk] = []
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine.generate(asked)))

    async def _read(self, stream: AsyncIterator[Chunk]) -> None:
        async for chunk in stream:
            self.chunks.append(chunk)
            self.begun.set()

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def stop(self) -> Stop | None:
        return self.chunks[-1].stop if self.chunks else None


async def turns(num: int = 10) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def begun(*consumers: Consumer) -> None:
    await asyncio.gather(*(consumer.begun.wait() for consumer in consumers))


def drive(adapter: Adapter, scene: Callable[[RolloutEngine], Coroutine[Any, Any, None]]) -> None:
    """Runs a scene with a fresh engine, closed afterwards; a scene that hangs fails."""

    async def main(engine: RolloutEngine) -> None:
        await asyncio.wait_for(scene(engine), 30)
        await engine.close()

    adapter.run(main)


async def finished(*consumers: Consumer) -> None:
    await asyncio.gather(*(consumer.task for consumer in consumers))


# --------------------------------------------------------------------------------------------------- streaming


def test_chunks(adapter: Adapter) -> None:
    """In order, one logprob a token, the policy on each, stop on the last and on no other; more requests than slots."""

    async def scene(engine: RolloutEngine) -> None:
        consumers = [Consumer(engine, request(i, tokens=(1,) * (i + 1), max_tokens=5 + i)) for i in range(8)]
        await finished(*consumers)
        for i, consumer in enumerate(consumers):
            assert len(consumer.tokens) == 5 + i
            assert [chunk.stop for chunk in consumer.chunks] == [None] * (len(consumer.chunks) - 1) + ["length"]
            for chunk in consumer.chunks:
                assert len(chunk.tokens) == len(chunk.logprobs)
                assert all(logprob <= 0 for logprob in chunk.logprobs)
                assert chunk.policy == engine.policy == PolicyRef()

    drive(adapter, scene)


def test_a_stop_id_ends_and_stays(adapter: Adapter) -> None:
    async def scene(engine: RolloutEngine) -> None:
        free = Consumer(engine, request(max_tokens=30))
        await finished(free)
        stop_id = free.tokens[7]
        stopped = Consumer(engine, request(max_tokens=30, stop_ids=(39, stop_id)))
        await finished(stopped)
        assert stopped.stop == "stop"
        assert stopped.tokens == free.tokens[: free.tokens.index(stop_id) + 1]

    drive(adapter, scene)


def test_a_stop_string_spans_tokens_and_stays(adapter: Adapter) -> None:
    async def scene(engine: RolloutEngine) -> None:
        free = Consumer(engine, request(max_tokens=30))
        await finished(free)
        text = characters(free.tokens)
        stopped = Consumer(engine, request(max_tokens=30, stop=("never said", text[4:7])))
        await finished(stopped)
        assert stopped.stop == "stop"
        assert characters(stopped.tokens) == text[: text.index(text[4:7]) + 3]

    drive(adapter, scene)


def test_stop_before_length(adapter: Adapter) -> None:
    async def scene(engine: RolloutEngine) -> None:
        free = Consumer(engine, request(max_tokens=9))
        await finished(free)
        at = free.tokens.index(free.tokens[-1])
        both = Consumer(engine, request(max_tokens=at + 1, stop_ids=(free.tokens[-1],)))
        await finished(both)
        assert both.stop == "stop"

    drive(adapter, scene)


# ------------------------------------------------------------------------------------------ continued requests


def test_a_continued_sample_is_the_undisturbed_one(adapter: Adapter) -> None:
    """Tokens and logprobs; max_tokens counts the earlier part, and a stop string may span the seam."""

    async def scene(engine: RolloutEngine) -> None:
        whole = Consumer(engine, request(max_tokens=30))
        await finished(whole)
        text = characters(whole.tokens)
        logprobs = [logprob for chunk in whole.chunks for logprob in chunk.logprobs]
        for sampled in (1, 13, 29):
            tokens = (1, 2, 3, *whole.tokens[:sampled])
            rest = Consumer(engine, request(tokens=tokens, sampled=sampled, max_tokens=30))
            await finished(rest)
            assert rest.tokens == whole.tokens[sampled:]
            assert [logprob for chunk in rest.chunks for logprob in chunk.logprobs] == logprobs[sampled:]
            assert rest.stop == "length"
        spanning = text[4:8]
        sampled = text.index(spanning) + 2
        rest = Consumer(
            engine, request(tokens=(1, 2, 3, *whole.tokens[:sampled]), sampled=sampled, max_tokens=30, stop=(spanning,))
        )
        await finished(rest)
        assert (len(rest.tokens), rest.stop) == (2, "stop")

    drive(adapter, scene)


def test_nothing_left_ends_at_once(adapter: Adapter) -> None:
    async def scene(engine: RolloutEngine) -> None:
        for sampled in (3, 4):
            consumer = Consumer(engine, request(tokens=(1, 2, 3, 4, 5), sampled=sampled, max_tokens=3))
            await finished(consumer)
            assert consumer.chunks == [Chunk((), (), PolicyRef(), "length")]

    drive(adapter, scene)


# -------------------------------------------------------------------------------------------- refused requests


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (request(tokens=(1,) * 500, max_tokens=13), "500 prompt tokens and max_tokens=13 make 513, but the context is 512"),
        (request(tokens=(1, 40)), "prompt token 40 is not in the vocabulary of 40"),
        (request(tokens=(-1, 3)), "prompt token -1"),
        (request(stop_ids=(41,)), "stop id 41"),
        (request(tokens=()), "at least one prompt token"),
        (request(tokens=(1, 2), sampled=2), "at least one prompt token"),
        (request(adapter="lora"), "adapter 'lora'"),
        (request(extra={"beams": 2}), r"\['beams'\]"),
        (request(min_policy=PolicyRef(version=1)), "policy@0.1 or later and the engine holds policy@0.0"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(adapter: Adapter, asked: GenerateRequest, says: str) -> None:
    async def scene(engine: RolloutEngine) -> None:
        with pytest.raises(EngineError, match=says):
            engine.generate(asked)

    drive(adapter, scene)


def test_a_context_that_just_fits(adapter: Adapter) -> None:
    async def scene(engine: RolloutEngine) -> None:
        consumer = Consumer(engine, request(tokens=(1,) * 500))
        await finished(consumer)
        assert len(consumer.tokens) == 12

    drive(adapter, scene)


# ------------------------------------------------------------------------------------- pause, abort, deadlines


def test_pause_and_resume(adapter: Adapter) -> None:
    """No token while paused, not for new requests either; afterwards the sample is the undisturbed one."""

    async def scene(engine: RolloutEngine) -> None:
        whole = Consumer(engine, request(max_tokens=LONG))
        await finished(whole)
        running = Consumer(engine, request(max_tokens=LONG))
        await begun(running)
        await engine.pause()
        await turns()  # what was sampled before arrives
        before = list(running.tokens)
        assert 0 < len(before) < LONG
        late = Consumer(engine, request(1))
        await turns(30)
        assert running.tokens == before
        assert not late.chunks
        await engine.resume()
        await finished(running, late)
        assert running.tokens == whole.tokens
        assert len(late.tokens) == 12

    drive(adapter, scene)


def test_abort_ends_with_partial_tokens(adapter: Adapter) -> None:
    """Running and waiting requests; unknown keys are fine, others go on."""

    async def scene(engine: RolloutEngine) -> None:
        running = [Consumer(engine, request(i, max_tokens=MANY)) for i in range(SLOTS)]
        waiting, other = Consumer(engine, request(10)), Consumer(engine, request(11))
        await begun(*running)
        await engine.abort([Key("t", 0), Key("t", 10), Key("elsewhere", 7)])
        await finished(running[0], waiting, other)  # `other` takes the place that is free now
        assert running[0].stop == "abort"
        assert 0 < len(running[0].tokens) < MANY
        assert waiting.chunks == [Chunk((), (), PolicyRef(), "abort")]
        assert (len(other.tokens), other.stop) == (12, "length")
        assert not running[1].task.done()
        await engine.abort([Key("t", 1), Key("t", 2)])
        await finished(*running)

    drive(adapter, scene)


def test_abort_while_paused(adapter: Adapter) -> None:
    async def scene(engine: RolloutEngine) -> None:
        consumer = Consumer(engine, request(max_tokens=MANY))
        await begun(consumer)
        await engine.pause()
        await engine.abort([Key("t", 0)])
        await finished(consumer)
        assert consumer.stop == "abort"

    drive(adapter, scene)


def test_a_deadline_aborts(adapter: Adapter) -> None:
    """From submission: a running request with its tokens, and one that never got a place."""

    async def scene(engine: RolloutEngine) -> None:
        await engine.pause()
        never = Consumer(engine, request(1, deadline_s=0.01))
        await finished(never)
        assert never.chunks == [Chunk((), (), PolicyRef(), "abort")]
        await engine.resume()
        whole = Consumer(engine, request(2, deadline_s=60.0))
        await finished(whole)
        assert whole.stop == "length"
        running = Consumer(engine, request(max_tokens=MANY, deadline_s=0.2))
        await begun(running)
        await engine.pause()
        await finished(running)
        assert running.stop == "abort"
        assert 0 < len(running.tokens) < MANY

    drive(adapter, scene)


@pytest.mark.parametrize("how", ["cancel", "close", "drop"])
def test_a_consumer_that_leaves_frees_its_place(adapter: Adapter, how: str) -> None:
    async def scene(engine: RolloutEngine) -> None:
        async def read_one(ordinal: int) -> None:
            stream = engine.generate(request(ordinal, max_tokens=MANY))
            if how == "drop":
                async for _ in stream:
                    return
            async with aclosing(stream) as chunks:
                async for _ in chunks:
                    return

        if how == "cancel":
            consumers = [Consumer(engine, request(i, max_tokens=MANY)) for i in range(SLOTS)]
            await begun(*consumers)
            leavers = [consumer.task for consumer in consumers]
            for task in leavers:
                task.cancel()
        else:
            leavers = [asyncio.create_task(read_one(i)) for i in range(SLOTS)]
        await asyncio.gather(*leavers, return_exceptions=True)
        if how == "drop":
            gc.collect()
            await turns()
        consumers = [Consumer(engine, request(10 + i)) for i in range(SLOTS)]
        await asyncio.sleep(adapter.step_s * MANY / 2)  # all of them run at once, which they could not beside a leaver
        await turns(MANY // 2)
        assert all(consumer.task.done() for consumer in consumers)

    drive(adapter, scene)


# ----------------------------------------------------------------------------------------------------- weights


def test_load_weights_marks_what_follows(adapter: Adapter) -> None:
    async def scene(engine: RolloutEngine) -> None:
        consumer = Consumer(engine, request(max_tokens=LONG))
        await begun(consumer)
        await engine.load_weights(SharedWeights(), PolicyRef(version=1))
        await turns(2)
        assert engine.policy == PolicyRef(version=1)
        before = len(consumer.tokens)
        assert 0 < before < LONG
        await finished(consumer)
        versions = [chunk.policy.version for chunk in consumer.chunks for _ in chunk.tokens]
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        late = Consumer(engine, request(1, min_policy=PolicyRef(version=1)))
        await finished(late)
        assert {chunk.policy.version for chunk in late.chunks} == {1}

    drive(adapter, scene)


def test_host_and_back(adapter: Adapter) -> None:
    """Nothing is sampled on the host; requests keep their place and go on as if nothing had been."""

    async def scene(engine: RolloutEngine) -> None:
        whole = Consumer(engine, request(max_tokens=LONG))
        await finished(whole)
        consumer = Consumer(engine, request(max_tokens=LONG))
        await begun(consumer)
        assert isinstance(await engine.place("host"), Mapping)  # of what is left there
        await turns()
        before = list(consumer.tokens)
        assert 0 < len(before) < LONG
        await turns(20)
        assert consumer.tokens == before
        await engine.place("device")
        await finished(consumer)
        assert consumer.tokens == whole.tokens

    drive(adapter, scene)


def test_close_ends_requests(adapter: Adapter) -> None:
    async def scene(engine: RolloutEngine) -> None:
        consumers = [Consumer(engine, request(i, max_tokens=MANY)) for i in range(SLOTS + 2)]
        await begun(*consumers[:SLOTS])
        unread = engine.generate(request(20))
        await engine.close()
        await finished(*consumers)
        assert [consumer.stop for consumer in consumers] == ["abort"] * (SLOTS + 2)
        with pytest.raises(EngineError, match="closed"):
            engine.generate(request(21))
        with pytest.raises(EngineError, match="closed"):
            await anext(unread)
        await engine.close()

    drive(adapter, scene)


def test_capabilities_are_known_words_and_torch_threads_are_left_alone(adapter: Adapter) -> None:
    before = torch.get_num_threads()

    async def scene(engine: RolloutEngine) -> None:
        assert engine.capabilities <= {"batch_invariant", "exact", "keep_kv", "media", "lora"}
        assert torch.get_num_threads() == before

    drive(adapter, scene)
