"""DatasetSource: rows to imitate, whole or not at all."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from tandem.data.fake import FakeDataset
from tandem.data_proto import DataProto
from tandem.errors import DataError
from tandem.queue.fake import FakeQueue
from tandem.text.fake import FakeRenderer
from tandem.trainer.dataset import Comparisons, DatasetSource, Demonstrations, RowMaker
from tandem.types import Message, PolicyRef, Task

DEMONSTRATIONS = Demonstrations(FakeRenderer(), max_context=32)
PAIRS = Comparisons(FakeRenderer(), max_context=32)
TASKS = [Task(f"t{i}", (Message("user", "?"), Message("assistant", "abc"[: i + 1]))) for i in range(3)]


def batches(tasks: list[Task], n: int, maker: RowMaker = DEMONSTRATIONS, tasks_per_step: int = 3) -> list[DataProto]:
    async def scenario() -> list[DataProto]:
        queue = FakeQueue()
        source = DatasetSource(
            dataset=FakeDataset(tasks, name="words"),
            maker=maker,
            queue=queue,
            tasks_per_step=tasks_per_step,
            seed=0,
            policy=PolicyRef(version=3),
        )
        out: list[DataProto] = []
        async with aclosing(aiter(source)) as given:
            for _ in range(n):
                batch = await anext(given)
                out.append(await queue.get(batch.keys, source.columns))
                metrics = await source.advance(source.policy.next())
                assert metrics["data/epochs"].value == sum(len(rows.ref().groups) for rows in out) / len(tasks)
        return out

    return asyncio.run(scenario())


def test_each_epoch_holds_every_demonstration_once_with_the_renderer_s_mask() -> None:
    renderer = FakeRenderer()
    expected = sorted(renderer.demonstration(task.messages) for task in TASKS)
    for rows in batches(TASKS, 2):
        parts = rows.split([1] * len(rows))
        assert sorted((tuple(part["tokens"].tolist()), tuple(part["mask"].tolist())) for part in parts) == expected
        assert rows["temperature"].tolist() == [1, 1, 1]


def test_nothing_is_cut_or_left_out_silently() -> None:
    with pytest.raises(DataError, match=r"'t\d' of 'words': the conversation has \d tokens, above max_context=4"):
        batches(TASKS, 1, Demonstrations(FakeRenderer(), max_context=4))
    with pytest.raises(DataError, match=r"'silent' of 'words': .*needs an assistant turn"):
        batches([Task("silent", (Message("user", "?"),))], 1)


def pair(name: str = "p", chosen: str = "yes", rejected: str = "no", **info: Any) -> Task:
    """A pair whose prompt holds an assistant turn, which is no part of either response."""
    prompt = (Message("user", "?"), Message("assistant", "what"), Message("user", "that"))
    return Task(name, prompt, info=info, chosen=(Message("assistant", chosen),), rejected=(Message("assistant", rejected),))


def test_a_pair_is_a_group_of_two_rows_whose_responses_alone_count() -> None:
    renderer, tasks = FakeRenderer(), [pair(f"p{i}", "yes" * (i + 1), margin=i) for i in range(3)]
    (rows,) = batches(tasks, 1, PAIRS)
    assert len(rows) == 6
    assert len(rows.ref().groups) == 3
    for i in range(6):
        row, chosen = rows.select([i]), bool(rows["chosen"][i])
        task = tasks[int(rows["margins"][i])]
        response = (task.chosen if chosen else task.rejected)[0].content
        assert chosen == (row.keys[0].member == 0)
        assert renderer.text(row["tokens"].tolist()) == f"?whatthat{response}"
        assert renderer.text(row["tokens"][row["mask"]].tolist()) == response
        assert int(row["mask"].sum()) == len(response) + 1  # with the token that ends it
        assert row["temperature"].tolist() == [1]


class Two(FakeRenderer):
    """A template whose prompt depends on what follows it."""

    def demonstration(self, messages: Any, *, given: int = 0) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        tokens, mask = super().demonstration(messages, given=given)
        return ((99, *tokens), (False, *mask)) if messages[-1].content == "no" else (tokens, mask)


@pytest.mark.parametrize(
    ("task", "maker", "says"),
    [
        (Task("p", (Message("user", "?"),)), PAIRS, "no chosen and rejected response"),
        (pair(rejected="no" * 20), PAIRS, "the prompt with its rejected response has .* tokens, above max_context=32"),
        (pair(margin="much"), PAIRS, "margin is 'much'"),
        (pair(), Comparisons(Two(), 32), "writes its prompt otherwise"),
    ],
)
def test_a_pair_that_cannot_be_compared_says_why(task: Task, maker: RowMaker, says: str) -> None:
    with pytest.raises(DataError, match=f"task 'p' of 'words': .*{says}"):
        batches([task], 1, maker)
