"""A reward model as a reward: which token is scored, what is scored together, and what a call that fails leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tandem.data_proto import DataProto
from tandem.errors import WorkerError
from tandem.models.values import ValueModel
from tandem.ports import Collect, Dispatch, register
from tandem.queue.fake import FakeQueue
from tandem.rewards.model import ModelReward
from tandem.runtime.fake import FakeGroup
from tandem.runtime.inline import InlineGroup
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.workers import ModelWorker
from tandem.types import Episode, Key, RewardResult
from tests.models.tiny import config
from tests.rewards.episodes import episode, group, task


class Slow:
    """Scores a row by its last token. going_on: what a call waits for."""

    def __init__(self) -> None:
        self.going_on = asyncio.Event()
        self.error: Exception | None = None

    @register(Dispatch.SPLIT, Collect.CONCAT)
    async def score(self, rows: DataProto) -> DataProto:
        await self.going_on.wait()
        if self.error is not None:
            raise self.error
        last = [part["tokens"][-1].item() for part in rows.split([1] * len(rows))]
        return DataProto.make(rows.keys, rows.lengths, row={"scores": torch.tensor(last, dtype=torch.float32)})


def values(results: Sequence[RewardResult]) -> list[float | None]:
    return [result.value for result in results]


def of(ordinal: int, *texts: str) -> tuple[Episode, ...]:
    """A group of its own."""
    episodes = [replace(each, key=each.key._replace(ordinal=ordinal)) for each in group(*texts)]
    return tuple(replace(each, samples=(replace(each.samples[0], key=each.key),)) for each in episodes)


def model_worker() -> ModelWorker:
    torch.manual_seed(3)
    model = ValueModel(config(vocab_size=128))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return ModelWorker(TorchEngine(model, TrainConfig()), FakeQueue())


def test_an_episode_is_scored_at_the_last_token_that_the_policy_wrote() -> None:
    """What its environment wrote after that, and what another branch says, is not read."""
    worker = model_worker()
    tokens, mask = np.array([5, 1, 2, 7, 8]), np.array([False, True, True, False, False])
    plain = episode("x").samples[0]
    last = replace(plain, tokens=tokens, mask=mask, logprobs=np.where(mask, -1.0, 0.0), policy=((plain.policy[0][0], 2),))
    branch = replace(plain, key=plain.key._replace(branch=1))
    whole = replace(episode("x"), samples=(branch, replace(last, key=plain.key)))
    cut = replace(last, tokens=tokens[:3], mask=mask[:3], logprobs=last.logprobs[:3])

    async def scenario() -> None:
        reward = ModelReward(InlineGroup([worker]))
        (found,) = await reward(task(), [whole])
        (same,) = await reward(task(), [replace(whole, samples=(cut,))])
        hidden = worker.engine.forward(DataProto.from_samples([cut]), frozenset({"values"}))["values"]
        assert found == same == RewardResult(hidden[-1].item())
        assert found.value != hidden[-2].item()

    asyncio.run(scenario())


def test_a_score_does_not_depend_on_what_is_scored_with_it_or_on_how_many_ranks() -> None:
    async def scenario() -> None:
        groups = [of(ordinal, *"abcdefgh"[: ordinal + 1]) for ordinal in range(4)]
        alone = [values(await ModelReward(InlineGroup([model_worker()]))(task(), members)) for members in groups]
        for ranks in (1, 2, 3):
            reward = ModelReward(InlineGroup([model_worker() for _ in range(ranks)]))
            together = await asyncio.gather(*(reward(task(), members) for members in groups))
            assert [values(results) for results in together] == alone

    asyncio.run(scenario())


def test_groups_that_wait_are_scored_in_one_call() -> None:
    async def scenario() -> None:
        slow = Slow()
        workers = FakeGroup(slow)
        reward = ModelReward(workers)
        calls = [asyncio.ensure_future(reward(task(), of(ordinal, "a", "b"))) for ordinal in range(5)]
        await asyncio.sleep(0.01)
        slow.going_on.set()
        assert [values(results) for results in await asyncio.gather(*calls)] == [[97, 98]] * 5
        sizes = [len(rows.keys) for _, (rows,) in workers.calls if isinstance(rows, DataProto)]
        assert sizes == [10]
        slow.going_on.clear()
        first = asyncio.ensure_future(reward(task(), of(5, "a")))
        await asyncio.sleep(0.01)
        rest = [asyncio.ensure_future(reward(task(), of(ordinal, "b"))) for ordinal in range(6, 9)]
        await asyncio.sleep(0.01)
        slow.going_on.set()
        assert [values(results) for results in await asyncio.gather(first, *rest)] == [[97], [98], [98], [98]]
        assert [len(rows.keys) for _, (rows,) in workers.calls if isinstance(rows, DataProto)] == [10, 1, 3]

    asyncio.run(scenario())


def test_a_cancelled_call_takes_nothing_from_the_others_and_one_that_fails_fails_for_all() -> None:
    async def scenario() -> None:
        slow = Slow()
        reward = ModelReward(FakeGroup(slow))
        first, second, third = (asyncio.ensure_future(reward(task(), of(ordinal, text))) for ordinal, text in enumerate("abc"))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        slow.going_on.set()
        assert values(await first) + values(await third) == [97, 99]
        slow.error = WorkerError("rank 0 was killed by SIGKILL")
        lost = await asyncio.gather(*(reward(task(), of(ordinal, "a")) for ordinal in range(2)), return_exceptions=True)
        assert lost == [slow.error] * 2
        slow.error = None
        assert values(await reward(task(), of(3, "a"))) == [97]
        await reward.close()

    asyncio.run(scenario())


def test_closing_ends_a_call_that_is_running() -> None:
    async def scenario() -> None:
        reward = ModelReward(FakeGroup(Slow()))
        calls = [asyncio.ensure_future(reward(task(), of(ordinal, "a"))) for ordinal in range(2)]
        await asyncio.sleep(0.01)
        await reward.close()
        await asyncio.gather(*calls, return_exceptions=True)
        assert [call.cancelled() for call in calls] == [True, True]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_score_that_is_no_number_and_an_episode_without_a_token_fail() -> None:
    nothing = episode("")
    empty = replace(nothing.samples[0], mask=np.array([False] * 3), logprobs=np.zeros(3), policy=(), key=Key("train", 8))

    class Broken:
        @register(Dispatch.SPLIT, Collect.CONCAT)
        async def score(self, rows: DataProto) -> DataProto:
            return DataProto.make(rows.keys, rows.lengths, row={"scores": torch.tensor([torch.nan, 0.0])})

    async def scenario() -> None:
        bad, blank = await ModelReward(FakeGroup(Broken()))(task(), [nothing, replace(nothing, key=empty.key, samples=(empty,))])
        assert bad.reason == "the reward model's score is nan"
        assert blank.reason == "the policy wrote no token that the reward model could score"

    asyncio.run(scenario())
