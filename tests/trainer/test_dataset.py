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
from tandem.trainer.dataset import DatasetSource, DatasetSourceConfig
from tandem.types import Message, PolicyRef, Task

TASKS = [Task(f"t{i}", (Message("user", "?"), Message("assistant", "abc"[: i + 1]))) for i in range(3)]


def batches(tasks: list[Task], n: int, **config: Any) -> list[DataProto]:
    async def scenario() -> list[DataProto]:
        queue = FakeQueue()
        source = DatasetSource(
            dataset=FakeDataset(tasks, name="words"),
            renderer=FakeRenderer(),
            queue=queue,
            config=DatasetSourceConfig(**config),
            seed=0,
            policy=PolicyRef(version=3),
        )
        out: list[DataProto] = []
        async with aclosing(aiter(source)) as given:
            for _ in range(n):
                batch = await anext(given)
                out.append(await queue.get(batch.keys, DatasetSource.columns))
                metrics = await source.advance(source.policy.next())
                assert metrics["data/epochs"].value == sum(map(len, out)) / len(tasks)
        return out

    return asyncio.run(scenario())


def test_each_epoch_holds_every_demonstration_once_with_the_renderer_s_mask() -> None:
    renderer = FakeRenderer()
    expected = sorted(renderer.demonstration(task.messages) for task in TASKS)
    for rows in batches(TASKS, 2, rows_per_step=3):
        parts = rows.split([1] * len(rows))
        assert sorted((tuple(part["tokens"].tolist()), tuple(part["mask"].tolist())) for part in parts) == expected
        assert rows["temperature"].tolist() == [1, 1, 1]


def test_nothing_is_cut_or_left_out_silently() -> None:
    with pytest.raises(DataError, match=r"'t\d' of 'words' has \d tokens, above max_context=4"):
        batches(TASKS, 1, rows_per_step=3, max_context=4)
    with pytest.raises(DataError, match=r"'silent' of 'words'.*assistant"):
        batches([Task("silent", (Message("user", "?"),))], 1)


@pytest.mark.parametrize("bad", [{"rows_per_step": 0}, {"max_context": 0}])
def test_config_says_what_is_wrong(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        DatasetSourceConfig(**bad)
