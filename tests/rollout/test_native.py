"""The native engine's own behaviour: batching, sharing, compaction, weights; the port's laws are in contracts/."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tandem.errors import ConfigError, EngineError
from tandem.models import decoder as decoders
from tandem.models.decoder import Decoder
from tandem.models.kv_cache import KVCache
from tandem.rollout import native
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.types import GenerateRequest, PolicyRef
from tandem.weights import Room, WeightBlock, WeightShard, nowhere
from tests.rollout.tiny import Answer, answer, answers, decoder, engine, request, run, trainer_logprobs

MODEL = decoder()


class Weights:
    """Another decoder's weights, to be copied or known to be shared."""

    def __init__(self, source: Decoder, shared: bool = False) -> None:
        self.source, self.shared = source, shared

    @property
    def blocks(self) -> tuple[WeightBlock, ...]:
        return tuple(shard.block for shard in self.shards())

    def shards(self, room: Room = nowhere) -> Iterator[WeightShard]:
        for name, tensor in self.source.named_parameters():
            yield WeightShard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())


# ---------------------------------------------------------------------------------------------------- batching


def test_a_group_is_prefilled_once() -> None:
    rollout = engine(MODEL)
    asked = [request(0, (1, 2, 3, 4, 5), member=i, max_tokens=4) for i in range(6)] + [request(1, (7, 8, 9), max_tokens=4)]
    got = run(rollout, asked)
    assert rollout.metrics()["prefill_tokens"].value == 5 + 3  # all are new: the last prompt token belongs to it, too
    assert len({tuple(one.tokens) for one in got[:6]}) > 1
    for one, alone in zip(got, asked, strict=True):
        assert run(engine(MODEL), [alone])[0] == one


def test_a_member_that_comes_later_shares_with_one_that_runs() -> None:
    rollout = engine(MODEL, slots=2)
    run(rollout, [request(0, (1, 2, 3, 4, 5), member=i, max_tokens=4 + i) for i in range(7)])
    assert rollout.metrics()["prefill_tokens"].value == 5


@pytest.mark.parametrize("prefill_tokens", [1, 20, 8192])
def test_prompts_of_all_lengths(prefill_tokens: int) -> None:
    """A single token too, in calls of any size."""
    asked = [request(i, range(1, 2 + 3 * i), max_tokens=3) for i in range(8)]
    rollout = engine(MODEL, prefill_tokens=prefill_tokens)
    got = run(rollout, asked)
    assert got == [run(engine(MODEL), [one])[0] for one in asked]
    assert rollout.metrics()["prefill_tokens"].value == sum(1 + 3 * i for i in range(8))


async def talk(rollout: NativeEngine, ordinal: int, member: int, turns: int, said: list[tuple[GenerateRequest, Answer]]) -> None:
    """Turns of one episode, each with three to nine tokens more than were there, and some steps of others between."""
    random = Random(f"{ordinal} {member}")
    tokens = [1 + ordinal, *range(2, 5 + ordinal)]
    for turn in range(turns):
        asked = replace(request(ordinal, tokens, member=member, max_tokens=random.randint(1, 9)), turn=turn)
        said.append((asked, got := await answer(rollout, asked)))
        tokens += [*got.tokens, *(random.randrange(60) for _ in range(random.randint(3, 9)))]
        for _ in range(random.randint(0, 12)):
            await asyncio.sleep(0)


def test_a_turn_reads_what_earlier_turns_did_not() -> None:
    """The first turn is over before anybody knows that there are turns, so that nothing of it is kept."""
    rollout, said = engine(MODEL), list[tuple[GenerateRequest, Answer]]()
    asyncio.run(talk(rollout, 0, 0, 4, said))
    lengths = [(len(asked.tokens), len(got.tokens)) for asked, got in said]
    kept = [0, 0, *(prompt + sampled - 1 for prompt, sampled in lengths[1:-1])]  # an answer's last token was never read
    assert rollout.metrics()["prefill_tokens"].value == sum(prompt - had for (prompt, _), had in zip(lengths, kept, strict=True))


@pytest.mark.parametrize("change", ["weights", "place", "history"])
def test_what_is_kept_is_of_these_weights_and_these_tokens(change: str) -> None:
    rollout, other = engine(decoder()), decoder(seed=1)

    async def main() -> list[Answer]:
        said: list[tuple[GenerateRequest, Answer]] = []
        await talk(rollout, 0, 0, 2, said)
        asked, got = said[-1]
        tokens = [*asked.tokens, *got.tokens, 7, 8, 9]
        if change == "history":
            tokens[3] += 1
        elif change == "place":
            await rollout.place("host")
            await rollout.place("device")
        else:
            await rollout.load_weights(Weights(other), PolicyRef(version=1))
        rollout.metrics()
        again = replace(request(0, tokens, max_tokens=5), turn=2)
        answers = [await answer(rollout, again)]
        assert rollout.metrics()["prefill_tokens"].value == len(tokens)
        return [*answers, await answer(engine(other if change == "weights" else MODEL), again)]

    found, lone = asyncio.run(main())
    assert (found.tokens, found.logprobs) == (lone.tokens, lone.logprobs)


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 12])
def test_what_is_kept_of_turns_changes_nothing(slots: int) -> None:
    """Of episodes with one to five turns each, more of them than slots: every answer is that of the same request alone."""
    said: list[tuple[GenerateRequest, Answer]] = []
    rollout = engine(MODEL, slots=slots, max_context=256)

    async def main() -> None:
        await asyncio.gather(
            *(talk(rollout, ordinal, member, 1 + ordinal % 5, said) for ordinal in range(6) for member in range(2))
        )

    asyncio.run(main())
    lone = [run(engine(MODEL, max_context=256), [asked])[0] for asked, _ in said]
    assert [(got.tokens, got.logprobs) for _, got in said] == [(one.tokens, one.logprobs) for one in lone]
    if slots == 12:
        assert rollout.metrics()["prefill_tokens"].value < 0.7 * sum(len(asked.tokens) for asked, _ in said)


def test_rows_that_move_together_take_all_of_their_caches_along() -> None:
    """Two rows of different lengths move into the places of two that end in one step."""
    asked = [request(i, range(1, 3), max_tokens=2) for i in range(2)]
    asked += [request(2, range(1, 4), max_tokens=8), request(3, range(1, 30), max_tokens=8)]
    rollout = engine(MODEL, slots=4)
    assert run(rollout, asked) == [run(engine(MODEL), [one])[0] for one in asked]
    assert rollout.metrics()["steps"].value == 8


def test_a_step_costs_what_its_live_rows_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leave and others take their places; when none waits, the batch shrinks."""
    sizes: list[int] = []
    decode = Decoder.decode

    def counted(self: Decoder, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        sizes.append(len(tokens))
        return decode(self, tokens, positions, cache)

    monkeypatch.setattr(Decoder, "decode", counted)
    lengths = [3, 9, 2, 6, 5, 5]
    rollout = engine(MODEL, slots=4)
    asked = [request(i, (1, 2 + i), max_tokens=length) for i, length in enumerate(lengths)]
    got = run(rollout, asked)
    assert sizes == [4, 4, 4, 4, 4, 3, 2, 1]  # after a first step, which is a prefill; the last two enter after steps 2 and 3
    metrics = rollout.metrics()
    assert metrics["sampled_tokens"].value == sum(lengths)
    assert metrics["steps"].value == 1 + len(sizes)
    assert metrics["live_rows"].value == (4 + sum(sizes)) / (1 + len(sizes))
    assert got == [run(engine(MODEL), [one])[0] for one in asked]
    assert rollout.metrics()["steps"].value == 0  # read once


def test_long_rows_stand_before_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where windows of two parts spare keys, and each row says what it says alone."""
    cuts: list[int] = []
    cut = decoders.window_cut

    def noted(positions: npt.NDArray[np.int64]) -> tuple[int, int]:
        cuts.append(cut(positions)[0])
        return cut(positions)

    monkeypatch.setattr(decoders, "window_cut", noted)
    asked = [request(i, range(1, 3), max_tokens=4 + i % 5) for i in range(60)]
    asked[30:30] = [request(99, range(1, 60), max_tokens=40)]
    got = run(engine(MODEL, slots=40), asked)
    assert 16 in cuts
    assert got[28:33] == [run(engine(MODEL), [one])[0] for one in asked[28:33]]


def test_chunks_gather_tokens() -> None:
    for chunk_tokens, num_chunks in ((1, 10), (4, 3), (64, 1)):
        got = run(engine(MODEL, chunk_tokens=chunk_tokens), [request(0, (1, 2), max_tokens=10)])[0]
        assert (len(got.tokens), got.num_chunks) == (10, num_chunks)


def test_rows_sample_each_in_their_own_way() -> None:
    """One batch: greedy, top-k 1, cut, hot and cold rows; logprobs are those of the whole scaled distribution."""
    ways = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 2.0}, {"temperature": 0.5}]
    asked = [request(i, (5, 4, 3), max_tokens=12, **way) for i, way in enumerate(ways)]
    got = run(engine(MODEL), asked)
    assert got[0].tokens == got[1].tokens
    want = trainer_logprobs(MODEL, list(zip(asked, got, strict=True)))
    for one, logprobs in zip(got, want, strict=True):
        assert torch.equal(torch.tensor(one.logprobs), logprobs)


def test_any_number_of_stop_ids() -> None:
    free = run(engine(MODEL), [request(0, (1, 2), max_tokens=20)])[0].tokens
    absent = [token for token in range(61) if token not in free]
    rollout = engine(MODEL, chunk_tokens=64)
    asked = [
        request(0, (1, 2), max_tokens=20, stop_ids=(free[5],)),
        request(0, (1, 2), max_tokens=20, stop_ids=(*absent[:7], free[3])),
        request(0, (1, 2), max_tokens=20),
    ]
    got = run(rollout, asked)
    assert [one.stop for one in got] == ["stop", "stop", "length"]
    assert [one.tokens for one in got] == [free[: free.index(free[5]) + 1], free[: free.index(free[3]) + 1], free]


def test_others_run_between_steps() -> None:
    async def scene() -> int:
        task = asyncio.create_task(answer(engine(MODEL), request(0, (1, 2), max_tokens=50)))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(scene()) >= 50


# ----------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("shared", [True, False])
def test_after_new_weights_nothing_of_the_old_is_used(shared: bool) -> None:
    """What follows is what a fresh engine with the new weights gives for the same prefix, running rows of all kinds."""
    model, new = decoder(), decoder(seed=1)
    asked = [request(0, (1, 2, 3, 4), member=i, max_tokens=30) for i in range(3)] + [request(1, (9,), max_tokens=30)]

    async def scene() -> list[Answer]:
        rollout = engine(model, chunk_tokens=7)
        got = [Answer([], [], []) for _ in asked]
        tasks = [asyncio.create_task(answer(rollout, one, into)) for one, into in zip(asked, got, strict=True)]
        for _ in range(12):
            await asyncio.sleep(0)
        if shared:
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), new.parameters(), strict=True):
                    mine.copy_(theirs)
        await rollout.load_weights(Weights(new, shared), PolicyRef(version=1))
        tasks.append(asyncio.create_task(answer(rollout, late)))  # shares the prompt of running rows
        await asyncio.gather(*tasks)
        return [*got, tasks[-1].result()]

    late = request(0, (1, 2, 3, 4), member=9, max_tokens=30)
    *running, last = asyncio.run(scene())
    for one, got in zip(asked, running, strict=True):
        old = got.policies.count(PolicyRef())
        assert 0 < old < 30
        continued = request(one.key.ordinal, (*one.tokens, *got.tokens[:old]), member=one.key.member, sampled=old, max_tokens=30)
        fresh = run(engine(new), [continued])[0]
        assert (got.tokens[old:], got.logprobs[old:]) == (fresh.tokens, fresh.logprobs)
        undisturbed = run(engine(decoder()), [one])[0]
        assert got.tokens[:old] == undisturbed.tokens[:old]
        assert got.tokens != undisturbed.tokens
    assert last.tokens == run(engine(new), [late])[0].tokens


def test_after_new_weights_one_that_begins_does_not_go_on_where_one_of_its_prompt_was() -> None:
    """Both are read anew in one pass, the one up to its prompt's last token, the other up to the last that it sampled."""
    model, new = decoder(), decoder(seed=1)
    prompt = (1, 2, 3, 4)

    async def scene() -> Answer:
        rollout = engine(model, slots=2)
        first, second, third = (
            asyncio.create_task(answer(rollout, request(0, prompt, member=member, max_tokens=30))) for member in range(3)
        )
        for _ in range(12):
            await asyncio.sleep(0)
        await rollout.pause()
        await rollout.abort([request(0, prompt, member=1).key])
        await rollout.load_weights(Weights(new), PolicyRef(version=1))
        await rollout.resume()
        await asyncio.gather(first, second)
        return await third

    assert asyncio.run(scene()).logprobs == run(engine(new), [request(0, prompt, member=2, max_tokens=30)])[0].logprobs


def test_the_host_holds_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[KVCache]] = []

    class Watched(KVCache):
        def __init__(self, *args: object, **named: object) -> None:
            super().__init__(*args, **named)  # type: ignore[arg-type]
            made.append(weakref.ref(self))

    monkeypatch.setattr(native, "KVCache", Watched)

    async def scene() -> None:
        rollout = engine(MODEL)
        await answers(rollout, [request(0, (1, 2), max_tokens=9)])
        assert made[0]() is not None
        await rollout.place("host")
        assert made[0]() is None
        await rollout.place("device")
        await answers(rollout, [request(0, (1, 2), max_tokens=9)])
        assert len(made) == 2

    asyncio.run(scene())


def test_new_weights_use_the_memory_of_the_old_ones_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of what it held: longer rows were there before."""
    made: list[KVCache] = []
    monkeypatch.setattr(native, "KVCache", lambda *sizes: made.append(KVCache(*sizes)) or made[-1])
    after = [request(1, (5, 6), max_tokens=6), request(2, (7,), max_tokens=9)]

    async def scene() -> list[Answer]:
        rollout = engine(decoder())
        await answers(rollout, [request(0, (1, 2, 3, 4), max_tokens=20)])
        await rollout.load_weights(Weights(decoder(seed=1)), PolicyRef(version=1))
        return await answers(rollout, after)

    got = asyncio.run(scene())
    assert len(made) == 1
    assert [each.logprobs for each in got] == [each.logprobs for each in run(engine(decoder(seed=1)), after)]


def test_the_decoder_can_be_trained_afterwards() -> None:
    model = decoder()
    asked = request(0, (1, 2, 3), max_tokens=5)
    run(engine(model), [asked])
    model.prefill(torch.tensor([[1, 2, 3]])).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "layers" in name)


# ---------------------------------------------------------------------------------------------------- failures


def test_a_failed_step_reaches_every_consumer_and_the_engine_recovers() -> None:
    model = decoder()
    rollout = engine(model, slots=2)
    asked = [request(i, (1, 2, 3), max_tokens=20) for i in range(4)]
    want = run(rollout, asked)
    good = model.model.norm.weight.detach().clone()

    async def broken() -> list[Answer | BaseException]:
        tasks = [asyncio.create_task(answer(rollout, one)) for one in asked]
        for _ in range(5):
            await asyncio.sleep(0)
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        return await asyncio.gather(*tasks, return_exceptions=True)

    for i, failure in enumerate(asyncio.run(asyncio.wait_for(broken(), 30))):
        assert isinstance(failure, EngineError)
        assert str(failure).startswith(
            f"request t:{i}.0.0: generation failed with NonFiniteError: the distributions of 2 of 2 rows"
        )
        assert failure.__cause__ is not None
    with torch.no_grad():
        model.model.norm.weight.copy_(good)
    assert run(rollout, asked) == want


def test_an_event_loop_that_ends_in_the_middle_leaves_a_usable_engine() -> None:
    rollout = engine(MODEL, slots=1)

    async def leave() -> None:
        tasks = [asyncio.create_task(answer(rollout, request(i, (1, 2), max_tokens=100))) for i in range(2)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not tasks[0].done()

    asyncio.run(leave())
    assert run(rollout, [request(0, (1, 2), max_tokens=9)]) == run(engine(MODEL), [request(0, (1, 2), max_tokens=9)])


def test_aborted_and_cancelled_requests_are_counted() -> None:
    rollout = engine(MODEL)

    async def scene() -> None:
        tasks = [asyncio.create_task(answer(rollout, request(i, (1, 2), max_tokens=100))) for i in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        await rollout.abort([request(0, (1,)).key])
        tasks[1].cancel()
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scene())
    metrics = rollout.metrics()
    assert (metrics["aborted"].value, metrics["cancelled"].value) == (1, 2)


def test_bad_configuration() -> None:
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        NativeConfig(slots=0)
    with pytest.raises(ConfigError, match="max_context 5000 is more than the model's 1024 positions"):
        NativeEngine(MODEL, str, NativeConfig(max_context=5000), exact=True)


def test_capabilities_say_what_the_probe_found() -> None:
    assert engine(MODEL).capabilities == {"batch_invariant", "exact"}
    assert NativeEngine(MODEL, str, NativeConfig(), exact=False).capabilities == frozenset()
