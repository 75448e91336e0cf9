"""The laws of ports.RolloutEngine, for the native engine and the fake."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import torch

from tandem.errors import EngineError
from tandem.models.decoder import DecoderConfig, init_decoder
from tandem.ports import RolloutEngine
from tandem.rollout.fake import FakeEngine
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.types import Chunk, GenerateRequest, Key, PolicyRef, SamplingParams, Stop
from tandem.weights import WeightBlock, WeightShard

SHAPE = DecoderConfig(
    vocab_size=40, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=512
)
SLOTS = 3
MANY = 400  # more tokens than any test waits for
Make = Callable[[], RolloutEngine]


def characters(tokens: Any) -> str:
    return "".join(chr(97 + token) for token in tokens)


def native() -> RolloutEngine:
    config = NativeConfig(slots=SLOTS, max_context=512, chunk_tokens=4)
    return NativeEngine(init_decoder(SHAPE, 0), characters, config, exact=True)


def fake() -> RolloutEngine:
    """Ten distinct tokens over and over, not the same for two prompts."""
    return FakeEngine(
        lambda p: [(sum(p) + i) % 10 for i in range(MANY)], slots=SLOTS, vocab_size=40, max_context=512, text=characters
    )


@pytest.fixture(params=[native, fake], ids=["native", "fake"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


class SharedWeights:
    """The engine reads the trainer's storage already."""

    shared = True
    blocks: tuple[WeightBlock, ...] = ()

    def shards(self) -> Iterator[WeightShard]:
        raise AssertionError("shared weights have nothing to move")


def request(ordinal: int = 0, *, tokens: tuple[int, ...] = (1, 2, 3), max_tokens: int = 12, **named: Any) -> GenerateRequest:
    fields = {name: named.pop(name) for name in ("sampled", "deadline_s", "adapter", "min_policy", "extra") if name in named}
    return GenerateRequest(Key("t", ordinal), tokens, SamplingParams(max_tokens=max_tokens, **named), seed=5, **fields)


class Consumer:
    """Iterates a request in a task of its own and keeps its chunks."""

    def __init__(self, engine: RolloutEngine, asked: GenerateRequest) -> None:
        self.chunks: list[Chunk] = []
        self.task = asyncio.create_task(self._read(engine.generate(asked)))

    async def _read(self, stream: AsyncIterator[Chunk]) -> None:
        async for chunk in stream:
            self.chunks.append(chunk)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def stop(self) -> Stop | None:
        return self.chunks[-1].stop if self.chunks else None


async def turns(num: int = 10) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def drive(make: Make, scene: Callable[[RolloutEngine], Coroutine[Any, Any, None]]) -> None:
    """Runs a scene with a fresh engine, closed afterwards; a scene that hangs fails."""

    @asynccontextmanager
    async def engine() -> AsyncIterator[RolloutEngine]:
        made = make()
        yield made
        await made.close()

    async def main() -> None:
        async with engine() as made:
            await asyncio.wait_for(scene(made), 30)

    asyncio.run(main())


async def finished(*consumers: Consumer) -> None:
    await asyncio.gather(*(consumer.task for consumer in consumers))


# --------------------------------------------------------------------------------------------------- streaming


def test_chunks(make: Make) -> None:
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

    drive(make, scene)


def test_a_stop_id_ends_and_stays(make: Make) -> None:
    async def scene(engine: RolloutEngine) -> None:
        free = Consumer(engine, request(max_tokens=30))
        await finished(free)
        stop_id = free.tokens[7]
        stopped = Consumer(engine, request(max_tokens=30, stop_ids=(39, stop_id)))
        await finished(stopped)
        assert stopped.stop == "stop"
        assert stopped.tokens == free.tokens[: free.tokens.index(stop_id) + 1]

    drive(make, scene)


def test_a_stop_string_spans_tokens_and_stays(make: Make) -> None:
    async def scene(engine: RolloutEngine) -> None:
        free = Consumer(engine, request(max_tokens=30))
        await finished(free)
        text = characters(free.tokens)
        stopped = Consumer(engine, request(max_tokens=30, stop=("never said", text[4:7])))
        await finished(stopped)
        assert stopped.stop == "stop"
        assert characters(stopped.tokens) == text[: text.index(text[4:7]) + 3]

    drive(make, scene)


def test_stop_before_length(make: Make) -> None:
    async def scene(engine: RolloutEngine) -> None:
        free = Consumer(engine, request(max_tokens=9))
        await finished(free)
        at = free.tokens.index(free.tokens[-1])
        both = Consumer(engine, request(max_tokens=at + 1, stop_ids=(free.tokens[-1],)))
        await finished(both)
        assert both.stop == "stop"

    drive(make, scene)


# ------------------------------------------------------------------------------------------ continued requests


def test_a_continued_sample_is_the_undisturbed_one(make: Make) -> None:
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

    drive(make, scene)


def test_nothing_left_ends_at_once(make: Make) -> None:
    async def scene(engine: RolloutEngine) -> None:
        for sampled in (3, 4):
            consumer = Consumer(engine, request(tokens=(1, 2, 3, 4, 5), sampled=sampled, max_tokens=3))
            await finished(consumer)
            assert consumer.chunks == [Chunk((), (), PolicyRef(), "length")]

    drive(make, scene)


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
def test_a_request_that_cannot_be_served_is_refused_at_once(make: Make, asked: GenerateRequest, says: str) -> None:
    async def scene(engine: RolloutEngine) -> None:
        with pytest.raises(EngineError, match=says):
            engine.generate(asked)

    drive(make, scene)


def test_a_context_that_just_fits(make: Make) -> None:
    async def scene(engine: RolloutEngine) -> None:
        consumer = Consumer(engine, request(tokens=(1,) * 500))
        await finished(consumer)
        assert len(consumer.tokens) == 12

    drive(make, scene)


# ------------------------------------------------------------------------------------- pause, abort, deadlines


def test_pause_and_resume(make: Make) -> None:
    """No token while paused, not for new requests either; afterwards the sample is the undisturbed one."""

    async def scene(engine: RolloutEngine) -> None:
        whole = Consumer(engine, request(max_tokens=40))
        await finished(whole)
        running = Consumer(engine, request(max_tokens=40))
        await turns(15)
        await engine.pause()
        await turns()  # what was sampled before arrives
        before = list(running.tokens)
        assert 0 < len(before) < 40
        late = Consumer(engine, request(1))
        await turns(30)
        assert running.tokens == before
        assert not late.chunks
        await engine.resume()
        await finished(running, late)
        assert running.tokens == whole.tokens
        assert len(late.tokens) == 12

    drive(make, scene)


def test_abort_ends_with_partial_tokens(make: Make) -> None:
    """Running and waiting requests; unknown keys are fine, others go on."""

    async def scene(engine: RolloutEngine) -> None:
        running = [Consumer(engine, request(i, max_tokens=MANY)) for i in range(SLOTS)]
        waiting, other = Consumer(engine, request(10)), Consumer(engine, request(11))
        await turns(12)
        await engine.abort([Key("t", 0), Key("t", 10), Key("elsewhere", 7)])
        await finished(running[0], waiting, other)  # `other` takes the place that is free now
        assert running[0].stop == "abort"
        assert 0 < len(running[0].tokens) < MANY
        assert waiting.chunks == [Chunk((), (), PolicyRef(), "abort")]
        assert (len(other.tokens), other.stop) == (12, "length")
        assert not running[1].task.done()
        await engine.abort([Key("t", 1), Key("t", 2)])
        await finished(*running)

    drive(make, scene)


def test_abort_while_paused(make: Make) -> None:
    async def scene(engine: RolloutEngine) -> None:
        consumer = Consumer(engine, request(max_tokens=MANY))
        await turns(8)
        await engine.pause()
        await engine.abort([Key("t", 0)])
        await finished(consumer)
        assert consumer.stop == "abort"

    drive(make, scene)


def test_a_deadline_aborts(make: Make) -> None:
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
        running = Consumer(engine, request(max_tokens=MANY, deadline_s=0.02))
        await turns(8)
        await engine.pause()
        await finished(running)
        assert running.stop == "abort"
        assert 0 < len(running.tokens) < MANY

    drive(make, scene)


@pytest.mark.parametrize("how", ["cancel", "close", "drop"])
def test_a_consumer_that_leaves_frees_its_place(make: Make, how: str) -> None:
    async def scene(engine: RolloutEngine) -> None:
        async def read_one(ordinal: int) -> None:
            stream = engine.generate(request(ordinal, max_tokens=MANY))
            if how == "drop":
                async for _ in stream:
                    return
            async with aclosing(stream) as chunks:  # type: ignore[type-var]
                async for _ in chunks:
                    return

        if how == "cancel":
            leavers = [Consumer(engine, request(i, max_tokens=MANY)).task for i in range(SLOTS)]
            await turns(8)
            for task in leavers:
                task.cancel()
        else:
            leavers = [asyncio.create_task(read_one(i)) for i in range(SLOTS)]
        await asyncio.gather(*leavers, return_exceptions=True)
        if how == "drop":
            gc.collect()
            await turns()
        consumers = [Consumer(engine, request(10 + i)) for i in range(SLOTS)]
        for _ in range(60):  # all of them run at once, which they could not beside a leaver
            await asyncio.sleep(0)
        assert all(consumer.task.done() for consumer in consumers)

    drive(make, scene)


# ----------------------------------------------------------------------------------------------------- weights


def test_load_weights_marks_what_follows(make: Make) -> None:
    async def scene(engine: RolloutEngine) -> None:
        consumer = Consumer(engine, request(max_tokens=40))
        await turns(15)
        await engine.load_weights(SharedWeights(), PolicyRef(version=1))
        await turns(2)
        assert engine.policy == PolicyRef(version=1)
        before = len(consumer.tokens)
        assert 0 < before < 40
        await finished(consumer)
        versions = [chunk.policy.version for chunk in consumer.chunks for _ in chunk.tokens]
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        late = Consumer(engine, request(1, min_policy=PolicyRef(version=1)))
        await finished(late)
        assert {chunk.policy.version for chunk in late.chunks} == {1}

    drive(make, scene)


def test_host_and_back(make: Make) -> None:
    """Nothing is sampled on the host; requests keep their place and go on as if nothing had been."""

    async def scene(engine: RolloutEngine) -> None:
        whole = Consumer(engine, request(max_tokens=40))
        await finished(whole)
        consumer = Consumer(engine, request(max_tokens=40))
        await turns(15)
        assert isinstance(await engine.place("host"), Mapping)  # of what is left there
        await turns()
        before = list(consumer.tokens)
        assert 0 < len(before) < 40
        await turns(20)
        assert consumer.tokens == before
        await engine.place("device")
        await finished(consumer)
        assert consumer.tokens == whole.tokens

    drive(make, scene)


def test_close_ends_requests(make: Make) -> None:
    async def scene(engine: RolloutEngine) -> None:
        consumers = [Consumer(engine, request(i, max_tokens=MANY)) for i in range(SLOTS + 2)]
        await turns(8)
        unread = engine.generate(request(20))
        await engine.close()
        await finished(*consumers)
        assert [consumer.stop for consumer in consumers] == ["abort"] * (SLOTS + 2)
        with pytest.raises(EngineError, match="closed"):
            engine.generate(request(21))
        with pytest.raises(EngineError, match="closed"):
            await anext(unread)
        await engine.close()

    drive(make, scene)


def test_capabilities_are_known_words(make: Make) -> None:
    assert make().capabilities <= {"batch_invariant", "exact", "keep_kv", "media", "lora"}


def test_torch_threads_are_left_alone(make: Make) -> None:
    before = torch.get_num_threads()
    make()
    assert torch.get_num_threads() == before
