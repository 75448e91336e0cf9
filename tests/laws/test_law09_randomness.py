"""Law 9: a sample is a function of (seed, key, turn, position) and the policy: of no companion, order, interruption or engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.rollout import randomness
from tandem.rollout import sampling as sampling_module
from tandem.rollout.native import NativeEngine
from tandem.rollout.sampling import Choices
from tandem.rollout.stepping import Stream
from tandem.types import GenerateRequest, Key
from tests.laws.breaking import Breaker
from tests.rollout.tiny import Answer, answer, decoder, engine, request, run

MODEL = decoder()
WAYS = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"temperature": 0.0}]


def work() -> list[GenerateRequest]:
    """Four groups of three, ragged, each request sampling in its own way."""
    return [
        request(i // 3, range(1, 3 + 2 * (i // 3)), member=i % 3, max_tokens=5 + 7 * i % 23, stop_ids=(3,), **WAYS[i % len(WAYS)])
        for i in range(12)
    ]


def alone(asked: Sequence[GenerateRequest]) -> list[Answer]:
    return [run(engine(MODEL), [one])[0] for one in asked]


def assert_same(got: Sequence[Answer], want: Sequence[Answer]) -> None:
    for mine, reference in zip(got, want, strict=True):
        assert (mine.tokens, mine.logprobs, mine.stop) == (reference.tokens, reference.logprobs, reference.stop)


def check_companions() -> None:
    """Alone, in one batch, through few slots, in another order, with strangers beside, and with other chunks."""
    asked = work()
    want = alone(asked)
    assert_same(run(engine(MODEL, slots=12), asked), want)
    assert_same(run(engine(MODEL, slots=2, chunk_tokens=3), asked), want)
    assert_same(run(engine(MODEL, slots=5), asked[::-1])[::-1], want)
    strangers = [request(100 + i, (9, i), max_tokens=3 + i, top_k=1 + i) for i in range(10)]
    mixed = [one for pair in zip(asked, strangers, strict=False) for one in pair] + asked[10:]
    got = dict(zip([one.key for one in mixed], run(engine(MODEL, slots=4), mixed), strict=True))
    assert_same([got[one.key] for one in asked], want)


def check_engines() -> None:
    """Two engines share the work, however it is dealt."""
    asked = work()
    want = alone(asked)
    for part in (range(0, 12, 2), range(5), (0, 11)):
        mine = [i for i in range(12) if i in part]
        other = [i for i in range(12) if i not in part]
        got = dict(zip(mine, run(engine(MODEL, slots=3), [asked[i] for i in mine]), strict=True))
        got |= dict(zip(other, run(engine(MODEL, slots=7), [asked[i] for i in other]), strict=True))
        assert_same([got[i] for i in range(12)], want)


def check_interruption() -> None:
    """Aborted again and again, and continued each time on another engine beside other rows."""
    asked = [request(i, (1, 2, 3), max_tokens=24, **WAYS[i % len(WAYS)]) for i in range(6)]
    want = alone(asked)

    async def until_aborted(rows: Sequence[GenerateRequest], turns: int) -> list[Answer]:
        rollout = engine(MODEL, chunk_tokens=5, slots=4)
        got = [Answer([], [], []) for _ in rows]
        tasks = [asyncio.create_task(answer(rollout, row, into)) for row, into in zip(rows, got, strict=True)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await rollout.abort([row.key for row in rows])
        await asyncio.gather(*tasks)
        return got

    whole = [Answer([], [], []) for _ in asked]
    for turns in (9, 4, 7, 200):
        rows = [
            request(one.key.ordinal, (*one.tokens, *said.tokens), sampled=len(said.tokens), max_tokens=24, **WAYS[i % len(WAYS)])
            for i, (one, said) in enumerate(zip(asked, whole, strict=True))
            if said.stop in (None, "abort")
        ]
        open_rows = [said for said in whole if said.stop in (None, "abort")]
        for said, more in zip(open_rows, asyncio.run(until_aborted(rows, turns)), strict=True):
            said.tokens += more.tokens
            said.logprobs += more.logprobs
            said.stop = more.stop
        assert turns == 200 or any(said.stop == "abort" and said.tokens for said in whole)
    assert_same(whole, want)


def check_names_matter() -> None:
    """Seed, ordinal, member, branch and turn each give another sample of the same prompt."""
    one = request(0, (1, 2, 3), max_tokens=16)
    key = Key("t", 0)
    variants = [
        one,
        GenerateRequest(key, one.tokens, one.params, seed=4),
        GenerateRequest(key, one.tokens, one.params, seed=3, turn=1),
        GenerateRequest(Key("t", 1), one.tokens, one.params, seed=3),
        GenerateRequest(Key("t", 0, 1), one.tokens, one.params, seed=3),
        GenerateRequest(Key("t", 0, 0, 1), one.tokens, one.params, seed=3),
        GenerateRequest(Key("eval", 0), one.tokens, one.params, seed=3),
    ]
    samples = [tuple(got.tokens) for got in run(engine(MODEL), variants)]
    assert len(set(samples)) == len(variants)


def test_a_sample_does_not_depend_on_its_companions() -> None:
    check_companions()


def test_a_sample_does_not_depend_on_the_number_of_engines() -> None:
    check_engines()


def test_a_sample_does_not_depend_on_interruption() -> None:
    check_interruption()


def test_every_part_of_its_name_matters() -> None:
    check_names_matter()


# ---------------------------------------------------------------------------------------------------- breakers

_GENERATOR = np.random.default_rng(0)


def _shared_generator(bases: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    return _GENERATOR.random(len(bases))


def _draws_by_slot(bases: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    return _UNIFORMS(bases + np.arange(len(bases), dtype=np.uint64), positions)


def _draws_from_the_request(self: NativeEngine, slot: int, stream: Stream) -> None:
    """Draws counted from where this request began, not from the beginning of the row."""
    _TAKE(self, slot, stream)
    begin = np.array([len(stream.tokens)], np.uint64) * randomness.GOLDEN
    self._table[slot]["base"] = (self._table[slot : slot + 1]["base"] - begin)[0]


def _one_top_k_for_all(logprobs: Tensor, uniforms: Tensor, choices: Choices) -> tuple[Tensor, Tensor]:
    top_k = torch.full_like(choices.top_k, int(choices.top_k.max()))
    return _SAMPLE(logprobs, uniforms, Choices(choices.greedy, choices.top_p, top_k, choices.min_p))


def _members_alike(seed: int, key: Key, turn: int) -> int:
    return _BASE(seed, key._replace(member=0), turn)


def _turns_alike(seed: int, key: Key, turn: int) -> int:
    return _BASE(seed, key, 0)


_UNIFORMS, _BASE, _SAMPLE, _TAKE = randomness.uniforms, randomness.base, sampling_module.sample, NativeEngine._take

BREAKERS = [
    Breaker(9, "shared-generator", "tandem.rollout.native:uniforms", _shared_generator, check_engines),
    Breaker(9, "draws-by-slot", "tandem.rollout.native:uniforms", _draws_by_slot, check_companions),
    Breaker(9, "draws-from-the-request", "tandem.rollout.native:NativeEngine._take", _draws_from_the_request, check_interruption),
    Breaker(9, "one-top-k-for-all", "tandem.rollout.native:sample", _one_top_k_for_all, check_companions),
    Breaker(9, "members-alike", "tandem.rollout.native:base", _members_alike, check_names_matter),
    Breaker(9, "turns-alike", "tandem.rollout.native:base", _turns_alike, check_names_matter),
]
