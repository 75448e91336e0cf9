"""HeldOutLoss: the objective over all held-out tasks as one step, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from tandem.algos.columns import unit_of
from tandem.algos.table import configure
from tandem.data.fake import FakeDataset
from tandem.data_proto import DataProto
from tandem.errors import DataError, QueueError
from tandem.queue.fake import FakeQueue
from tandem.runtime.inline import InlineGroup
from tandem.text.fake import FakeRenderer
from tandem.train.config import TrainConfig
from tandem.train.fake import FakeTrainEngine
from tandem.trainer.dataset import Comparisons, Demonstrations, RowMaker
from tandem.trainer.heldout import HeldOutLoss
from tandem.trainer.plan import Plan, plan
from tandem.trainer.stages import on_rows
from tandem.trainer.workers import TrainWorker
from tandem.types import Key, Message, Metrics, PolicyRef, Task

PAIRS = [
    Task(f"p{i}", (Message("user", "?"),), chosen=(Message("assistant", "a" * (i + 1)),), rejected=(Message("assistant", "b"),))
    for i in range(5)
]
TOLD = [Task(f"t{i}", (Message("user", "?"), Message("assistant", "ab" * (i + 1)))) for i in range(5)]


def reference(queue: FakeQueue) -> Plan:
    """A stage that gives ref_logprobs."""

    def flat(rows: DataProto) -> tuple[DataProto, Metrics]:
        return rows.with_columns(token={"ref_logprobs": torch.full((rows.num_tokens,), -2.0)}), Metrics.sum({"stage/runs": 1})

    stage = on_rows("reference", frozenset({"tokens"}), frozenset({"ref_logprobs"}), flat, queue, "row")
    return plan({"ref_logprobs"}, {"tokens"}, [stage])


def measured(name: str, tasks: list[Task], maker: RowMaker, num: int = 5, policies: int = 1) -> tuple[list[Metrics], FakeQueue]:
    async def scenario() -> tuple[list[Metrics], FakeQueue]:
        queue, objective = FakeQueue(), configure(name)
        worker = TrainWorker(FakeTrainEngine(FakeRenderer.vocab_size, TrainConfig()), queue, objective)
        heldout = HeldOutLoss(
            dataset=FakeDataset(tasks, name="held"),
            maker=maker,
            tasks=num,
            queue=queue,
            plan=reference(queue) if "ref_logprobs" in objective.needs else Plan(()),
            workers=InlineGroup([worker]),
            unit=unit_of(objective),
        )
        return [await heldout.measure(PolicyRef(version=version)) for version in range(policies)], queue

    return asyncio.run(scenario())


def test_every_token_counts_once_whatever_the_batch() -> None:
    (metrics,), _ = measured("sft", TOLD, Demonstrations(FakeRenderer(), 64))
    assert metrics["eval/loss"].value == pytest.approx(torch.tensor(float(FakeRenderer.vocab_size)).log().item())
    assert metrics["eval/nll"].count == sum(2 * (i + 1) + 1 for i in range(5))
    assert metrics["eval/n"].value == 5
    assert all(name.startswith("eval/") for name in metrics)


def test_pairs_pass_through_the_stages_of_the_plan() -> None:
    (metrics,), _ = measured("dpo", PAIRS, Comparisons(FakeRenderer(), 64), num=4)
    assert metrics["eval/preference_accuracy"].count == metrics["eval/n"].value == 4
    gain = -torch.tensor(float(FakeRenderer.vocab_size)).log().item() + 2  # a token, in a response of i + 2 against one of 2
    assert metrics["eval/reward_margin"].value == pytest.approx(0.1 * gain * (0 + 1 + 2 + 3) / 4, rel=1e-5)


def test_nothing_stays_in_the_queue_and_the_same_is_measured_again() -> None:
    both, queue = measured("sft", TOLD, Demonstrations(FakeRenderer(), 64), policies=2)
    assert both[0].values_by_name() == both[1].values_by_name()
    with pytest.raises(QueueError, match="not in the queue"):
        asyncio.run(queue.get([Key("heldout policy@0.0", 0)], frozenset({"tokens"})))


def test_a_task_without_what_is_measured_is_named_before_anything_runs() -> None:
    lacking = [*PAIRS[:4], replace(PAIRS[4], rejected=())]
    with pytest.raises(DataError, match="'p4' of 'held': it has no chosen and rejected"):
        measured("dpo", lacking, Comparisons(FakeRenderer(), 64))
