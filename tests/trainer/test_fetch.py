"""What is read from the queue: numbers are checked where their rows have keys, and groups where they may have been cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.errors import ColumnError, NonFiniteError
from tandem.queue.fake import FakeQueue
from tandem.trainer.fetch import fetch
from tandem.trainer.stages import advantages
from tandem.types import GroupKey, Metrics
from tests.trainer.test_stages import rows as two_groups

GRPO = configure("grpo")


def rows(*, token: dict[str, Tensor] | None = None, row: dict[str, Tensor] | None = None) -> DataProto:
    """Two groups; one has four rows and one has two."""
    return two_groups().with_columns(token=token, row={"group_rows": torch.tensor([4, 2, 4, 4, 2, 4]), **(row or {})})


async def queue_of(batch: DataProto) -> FakeQueue:
    queue = FakeQueue()
    for ordinal in range(2):
        await queue.reserve(GroupKey("train", ordinal), 2)
    await queue.put(batch)
    return queue


def read(batch: DataProto, *columns: str) -> DataProto:
    async def scenario() -> DataProto:
        return await fetch(await queue_of(batch), batch.ref(), frozenset(columns))

    return asyncio.run(scenario())


def test_a_number_that_counts_names_the_row_by_key() -> None:
    values = torch.zeros(12)
    values[3] = torch.inf
    with pytest.raises(NonFiniteError, match=r"column 'values' is inf at token 1 of row train:1\.0\.0;"):
        read(rows(token={"values": values}), "values")
    rewards = torch.tensor([0.0, 0, 0, torch.nan, 0, 0])
    with pytest.raises(NonFiniteError, match=r"column 'rewards' is nan at row train:0\.0\.1;"):
        read(rows(row={"rewards": rewards}), "rewards")


def test_a_number_that_is_masked_may_be_anything() -> None:
    batch = rows(token={"values": torch.where(two_groups()["mask"], 0.0, torch.nan)})
    assert read(batch, "values")["values"].isnan().any()


def test_a_column_that_is_missing_is_named() -> None:
    with pytest.raises(ColumnError, match="values"):
        read(rows(), "values")


def advantages_of(positions: Sequence[int]) -> Metrics:
    async def scenario() -> Metrics:
        batch = rows()
        return (await advantages(GRPO, await queue_of(batch)).run(batch.ref().select(positions)))[1]

    return asyncio.run(scenario())


@pytest.mark.parametrize("left", [[0, 1, 2, 3, 4], [1, 2, 4], [0, 2, 3, 5, 1]])
def test_a_part_of_a_group_has_no_advantages(left: list[int]) -> None:
    """A branch of an episode is missing, an episode, or an episode of the other group."""
    with pytest.raises(ColumnError, match=r"group train:\d has \d rows and \d of them are in this batch"):
        advantages_of(left)


def test_whole_groups_in_any_order_have_them() -> None:
    assert advantages_of([5, 0, 3, 2])
    assert advantages_of([4, 2, 1, 5, 0, 3])
