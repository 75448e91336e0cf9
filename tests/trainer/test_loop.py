"""The loop: one for every objective, and exactly the same numbers when it is stopped and resumed."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch

from tandem.algos.table import configure
from tandem.checkpoint.fake import FakeCheckpoint
from tandem.data.fake import FakeDataset
from tandem.errors import NonFiniteError
from tandem.ports import Learner, Source
from tandem.queue.fake import FakeQueue
from tandem.runtime.inline import InlineGroup
from tandem.track.fake import ListTracker
from tandem.trainer.dataset import DatasetSource, Demonstrations
from tandem.trainer.fake import FakeLearner, FakeSource
from tandem.trainer.learner import LearnerConfig, MinibatchLearner, Trained
from tandem.trainer.loop import measured, train
from tandem.trainer.plan import Plan, plan
from tandem.trainer.workers import ModelWorker, TrainWorker
from tandem.types import Message, Metric, Metrics, PolicyRef, Task
from tests.trainer.world import LETTERS, TableEngine, TableRollout, World, world


class Recorder:
    """Hooks that keep what they are told."""

    def __init__(self) -> None:
        self.steps: list[tuple[PolicyRef, Metrics]] = []

    async def after_step(self, policy: PolicyRef, metrics: Metrics) -> None:
        self.steps.append((policy, metrics))


async def run(
    source: Source, made_plan: Plan, learner: Learner, engine: TableEngine, rollout: TableRollout, steps: int
) -> Recorder:
    checkpoint, hooks = FakeCheckpoint(), Recorder()
    await checkpoint.connect(InlineGroup([ModelWorker(engine, FakeQueue())]), [rollout])
    await train(source, made_plan, learner, checkpoint, ListTracker(), hooks, steps=steps)
    return hooks


def run_world(made: World, steps: int) -> Recorder:
    return asyncio.run(run(made.source, made.plan, made.learner, made.engine, made.rollout, steps))


def test_order_of_a_step() -> None:
    async def scenario() -> None:
        source, learner, checkpoint, hooks = FakeSource(), FakeLearner(), FakeCheckpoint(), Recorder()
        await checkpoint.connect(InlineGroup([ModelWorker(TableEngine(), FakeQueue())]), [])
        tracker = ListTracker()
        policy = await train(source, Plan(()), learner, checkpoint, tracker, hooks, steps=2)
        step = ["batch", "training", "trained"]
        assert source.calls == [*step, "advance 1", *step, "advance 2", "closed"]
        assert policy == PolicyRef(version=2)
        assert checkpoint.published == [PolicyRef(version=v) for v in range(3)]
        assert [policy.version for policy, _ in hooks.steps] == [1, 2]
        assert hooks.steps[0][1]["time/step_s"].value >= hooks.steps[0][1]["time/update_s"].value
        again = await train(source, Plan(()), learner, checkpoint, tracker, hooks, steps=2)
        assert again == policy
        assert len(learner.batches) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("ranks", [1, 2])
def test_grpo_learns_to_say_a(ranks: int) -> None:
    made = world(ranks=ranks)
    hooks = run_world(made, 16)
    assert made.engine.table.softmax(-1)[LETTERS.index("a")] > 0.9
    rewards = [metrics["reward/mean"].value for _, metrics in hooks.steps]
    assert rewards[0] < 0.5 < 0.9 < rewards[-1]
    first = hooks.steps[0][1].values_by_name()
    assert first["mismatch/max"] == first["mismatch/tokens"] == 0
    assert first["train/optimizer_steps"] == 1
    assert first["rollout/episodes"] == 12
    assert first["queue/groups"] == 0
    assert first["time/tokens_per_s"] > 0
    assert first["train/tokens"] == 24


def test_dynamic_sampling_with_epochs_and_minibatches_runs_the_same_loop() -> None:
    made = world(algorithm="dapo", learner=LearnerConfig(epochs=2, minibatches=3))
    hooks = run_world(made, 3)
    assert made.engine.steps == 18
    assert all(metrics["train/groups_without_advantage"].value == 0 for _, metrics in hooks.steps)


def test_sft_is_the_same_loop() -> None:
    class Letters:
        """A renderer whose tokens are letters."""

        stop_ids = ()

        def demonstration(self, messages: tuple[Message, ...], *, given: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
            said = [LETTERS.index(letter) for letter in messages[-1].content]
            return (len(LETTERS), *said), (False, *[True] * len(said))

    queue, engine, rollout, sft = FakeQueue(), TableEngine(), TableRollout(), configure("sft")
    tasks = [Task(f"t{i}", (Message("user", "?"), Message("assistant", "b" * (i + 1)))) for i in range(4)]
    source = DatasetSource(
        dataset=FakeDataset(tasks),
        maker=Demonstrations(Letters(), max_context=8),  # type: ignore[arg-type]
        queue=queue,
        tasks_per_step=3,
        seed=0,
        policy=PolicyRef(),
    )
    learner = MinibatchLearner([Trained(InlineGroup([TrainWorker(engine, queue, sft)]))], LearnerConfig(), seed=0)
    made_plan = plan(sft.needs, source.columns, [])
    assert str(made_plan) == "nothing"
    hooks = asyncio.run(run(source, made_plan, learner, engine, rollout, 10))
    losses = [metrics["train/loss"].value for _, metrics in hooks.steps]
    assert losses[0] == pytest.approx(math.log(4))
    assert losses == sorted(losses, reverse=True)
    assert engine.table.argmax() == LETTERS.index("b")
    assert not any(name.startswith(("reward/", "rollout/")) for name in hooks.steps[0][1])


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("algorithm", ["dapo", "remax"])
def test_steps_before_and_after_a_resume_equal_steps_without_one(tmp_path: Path, algorithm: str, at: int) -> None:
    whole = world(algorithm=algorithm)
    run_world(whole, 5)

    first = world(algorithm=algorithm)
    run_world(first, at)
    first.engine.save(tmp_path / "engine")
    asyncio.run(first.queue.save(tmp_path / "queue"))
    state = json.loads(json.dumps(first.source.state()))

    second = world(algorithm=algorithm)
    second.engine.load(tmp_path / "engine")
    asyncio.run(second.queue.restore("s", tmp_path / "queue"))
    second.source.restore(state)
    run_world(second, 5)
    assert torch.equal(second.engine.table, whole.engine.table)


def test_means_of_nothing_are_left_out() -> None:
    metrics = Metrics({"a": Metric(0.0, 0.0), "b": Metric(0.0, 3.0), "c": Metric(0.0, 0.0, "sum")})
    assert measured(metrics).values_by_name() == {"b": 0.0, "c": 0.0}


def test_a_reward_that_is_not_a_number_stops_the_loop() -> None:
    with pytest.raises(NonFiniteError, match="nan"):
        run_world(world(reward=lambda episode: math.nan), 1)
