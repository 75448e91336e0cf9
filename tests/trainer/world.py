"""A whole run in small: a policy that is a table of four letters, and real queue, plan, learner and source around it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.agents.single_turn import SingleTurn
from tandem.algos.aggregation import aggregate
from tandem.algos.functions import loss_function
from tandem.algos.table import configure
from tandem.algos.terms import LossInputs
from tandem.data.fake import FakeDataset
from tandem.data_proto import DataProto
from tandem.ports import AgentLoop, Dataset, Held, Place, Reply, WeightSource
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.runtime.inline import InlineGroup
from tandem.trainer.learner import LearnerConfig, MinibatchLearner, Trained
from tandem.trainer.plan import BatchStage, Plan, plan
from tandem.trainer.schedule import Schedule, schedule
from tandem.trainer.source import RolloutConfig, RolloutSource
from tandem.trainer.stages import advantages, derived, model_outputs, resample
from tandem.trainer.workers import TrainWorker
from tandem.types import (
    Algorithm,
    Chunk,
    Episode,
    GenerateRequest,
    Json,
    Key,
    LossRef,
    Message,
    Metrics,
    PolicyRef,
    RewardResult,
    Sample,
    SamplingParams,
    Stop,
    Task,
)
from tandem.weights import WeightBlock, WeightLayout, WeightShard, WeightSpec

LETTERS = "abcd"


class TableEngine:
    """Implements ports.TrainEngine: the logprob of a letter is log_softmax(table / temperature), whatever came before."""

    def __init__(self, lr: float = 1.0) -> None:
        self.table = torch.zeros(len(LETTERS), dtype=torch.float64, requires_grad=True)
        self.lr = lr
        self.steps = 0
        self.seen: list[DataProto] = []

    def logprobs(self, batch: DataProto) -> torch.Tensor:
        rows = batch["temperature"][batch.row_of_token, None]
        scores = torch.log_softmax(self.table / torch.where(rows == 0, 1.0, rows).double(), -1)
        picked = scores.gather(1, batch["tokens"].clamp(max=len(LETTERS) - 1)[:, None])[:, 0]
        return torch.where(batch["mask"], picked, 0.0).float()

    def forward(self, batch: DataProto, want: frozenset[str], *, top: int = 0) -> DataProto:
        with torch.no_grad():
            return DataProto.make(batch.keys, batch.lengths, token={"logprobs": self.logprobs(batch)})

    def forward_backward(self, batch: DataProto, loss: LossRef) -> tuple[Metrics, DataProto]:
        self.seen.append(batch)
        logprobs = self.logprobs(batch)
        result = loss_function(loss.name)(
            LossInputs(logprobs, batch["mask"], batch.lengths, batch.batch, groups=batch.group_of_row), **loss.params
        )
        total = aggregate(result.loss, batch["loss_weights"], batch["mask"])
        total.backward()
        metrics = Metrics.mean({"train/loss": total.item()})
        return metrics, DataProto.make(batch.keys, batch.lengths, token={"logprobs": logprobs.detach()})

    def step(self) -> Metrics:
        assert self.table.grad is not None
        norm = self.table.grad.norm().item()
        with torch.no_grad():
            self.table -= self.lr * self.table.grad
        self.table.grad = None
        self.steps += 1
        return Metrics.mean({"train/grad_norm": norm})

    def layout(self) -> WeightLayout:
        return WeightLayout((WeightSpec("table", (len(LETTERS),), "float64"),))

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard("table", (len(LETTERS),), (0,), self.table.detach())

    def place(self, where: Place, *, weights: bool = True) -> Mapping[str, int]:
        return {}

    def save(self, path: Path) -> None:
        self.snapshot()(path)

    def snapshot(self) -> Callable[[Path], None]:
        return partial(torch.save, self.table.detach().clone())

    def load(self, path: Path) -> None:
        with torch.no_grad():
            self.table.copy_(torch.load(path))


class TableRollout:
    """As much of ports.RolloutEngine as a source needs; `events` tells what it was asked to do."""

    capabilities: frozenset[str] = frozenset({"batch_invariant", "exact"})

    def __init__(self) -> None:
        self.policy = PolicyRef()
        self.events: list[str] = []

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        raise NotImplementedError

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        self.policy = policy

    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held:
        raise NotImplementedError

    async def pause(self) -> None:
        self.events.append("pause")

    async def resume(self) -> None:
        self.events.append("resume")

    async def abort(self, keys: Collection[Key]) -> None: ...

    async def place(self, where: Place) -> Mapping[str, int]:
        self.events.append(where)
        return {}

    async def close(self) -> None: ...


class TableLLM:
    """Implements ports.LLM: two letters from the table, by (seed, key) alone."""

    def __init__(self, engine: TableEngine, rollout: TableRollout, key: Key, seed: int, params: SamplingParams) -> None:
        self._engine, self._rollout, self._key, self._seed, self._params = engine, rollout, key, seed, params
        self._samples: tuple[Sample, ...] = ()

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Json]] = (), params: SamplingParams | None = None
    ) -> Reply:
        names = [self._seed, zlib.crc32(self._key.space.encode()), *self._key[1:]]
        random = np.random.Generator(np.random.Philox(names))
        await asyncio.sleep(float(random.random()) / 1000)  # episodes end in an order of their own
        temperature = self._params.temperature
        with torch.no_grad():
            scores = torch.log_softmax(self._engine.table / (temperature or 1.0), -1)
        shares = scores.exp().numpy()
        greedy = int(scores.argmax())
        letters = [int(random.choice(len(LETTERS), p=shares / shares.sum())) if temperature else greedy for _ in range(2)]
        prompt = [len(LETTERS)] * len("".join(message.content for message in messages))
        self._samples = (
            Sample(
                self._key,
                np.array(prompt + letters),
                np.array([False] * len(prompt) + [True] * 2),
                np.array([0.0] * len(prompt) + [float(scores[i]) for i in letters]),
                ((self._rollout.policy, 2),),
                "stop",
                temperature,
                full_support=temperature > 0,
            ),
        )
        return Reply(Message("assistant", "".join(LETTERS[i] for i in letters)), "stop")

    async def complete(self, tokens: Sequence[int], params: SamplingParams | None = None) -> tuple[tuple[int, ...], Stop]:
        raise NotImplementedError

    def samples(self) -> tuple[Sample, ...]:
        return self._samples


class FunctionReward:
    """Implements ports.Reward with a function of one episode: a number, or a RewardResult."""

    def __init__(self, function: Callable[[Episode], float | RewardResult] | None = None) -> None:
        self._function = function or (lambda episode: episode.completion.count("a") / 2)
        self.judged: list[Episode] = []

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        self.judged += group
        values = [self._function(episode) for episode in group]
        return [value if isinstance(value, RewardResult) else RewardResult(value) for value in values]

    async def close(self) -> None: ...


@dataclass
class World:
    queue: MemoryQueue
    engine: TableEngine
    rollout: TableRollout
    reward: FunctionReward
    algorithm: Algorithm
    source: RolloutSource
    plan: Plan
    learner: MinibatchLearner


def world(
    *,
    reward: Callable[[Episode], float | RewardResult] | None = None,
    agent: AgentLoop | None = None,
    config: RolloutConfig | None = None,
    learner: LearnerConfig | None = None,
    algorithm: str = "grpo",
    params: Mapping[str, Json] | None = None,
    dataset: Dataset | None = None,
    ranks: int = 1,
    seed: int = 0,
    policy: PolicyRef | None = None,
    stall_limit_s: float = 5.0,
    components: Sequence[str] = (),
    ahead: Callable[[MemoryQueue], BatchStage] | None = None,
    timing: Schedule | None = None,
    rollout: TableRollout | None = None,
    **sampling: Any,
) -> World:
    """GRPO on groups of 4 in batches of 3, with what a test wants otherwise. ahead: a stage that runs before the batch is whole."""
    queue = MemoryQueue(QueueConfig(stall_limit_s=stall_limit_s))
    engine, rollout, rewarded = TableEngine(), rollout or TableRollout(), FunctionReward(reward)
    chosen = configure(algorithm, params)
    group = InlineGroup([TrainWorker(engine, queue, chosen) for _ in range(ranks)])
    stages = [
        advantages(chosen, queue),
        model_outputs("old_logprobs", group, {"old_logprobs": "logprobs"}, "current", against="rollout_logprobs"),
        resample(chosen, queue, seed=seed),
        *derived(chosen, queue, seed=seed),
    ]
    planned = plan(chosen.needs, RolloutSource.columns, stages)
    source = RolloutSource(
        dataset=FakeDataset() if dataset is None else dataset,
        agent=agent or SingleTurn(),
        reward=rewarded,
        make_llm=lambda key, seed, params: TableLLM(engine, rollout, key, seed, params),
        params=SamplingParams(**sampling),
        queue=queue,
        engines=[rollout],
        algorithm=chosen,
        schedule=timing or schedule("sync"),
        config=config or RolloutConfig(groups_per_step=3, group_size=4),
        seed=seed,
        policy=policy or PolicyRef(),
        reads=planned.reads,
        record=lambda episode: {"key": str(episode.key)},
        components=components,
        ahead=Plan(() if ahead is None else (ahead(queue),)),
    )
    return World(
        queue,
        engine,
        rollout,
        rewarded,
        chosen,
        source,
        planned,
        MinibatchLearner([Trained(group)], learner or LearnerConfig(), seed=seed),
    )
