"""Rows as a stage or a worker reads them from the queue: the one place where numbers are known together with their rows' keys."""

from __future__ import annotations

from collections import Counter
from typing import cast

from tandem.algos.checks import keep, require_finite
from tandem.data_proto import DataProto
from tandem.errors import ColumnError
from tandem.ports import TransferQueue
from tandem.types import BatchRef

GROUP_ROWS = "group_rows"
"""Row column, int64: how many rows the row's group has, its episodes' branches included."""


async def fetch(queue: TransferQueue, batch: BatchRef, columns: frozenset[str]) -> DataProto:
    """These columns of the rows of a batch.

    Raises ColumnError for one that is missing, NonFiniteError for a number that counts and is not finite: by column, key
    and value. A number of a token counts where column `mask` is true.
    """
    rows = await queue.get(batch.keys, columns | (batch.columns & {"mask", GROUP_ROWS}))
    for name, tensor in rows.batch.items():
        if not tensor.is_floating_point():
            continue
        if name not in rows.token_level:
            require_finite(name, tensor, "row", keys=rows.keys)
        elif "mask" in rows.batch:
            require_finite(name, keep(tensor, rows["mask"]), "token", rows.lengths, rows.keys)
    return rows


def require_whole_groups(rows: DataProto) -> None:
    """Raises ColumnError for a group of which only some rows are here, where column `group_rows` says how many there are."""
    if GROUP_ROWS not in rows.batch:
        return
    here = Counter(key.group for key in rows.keys)
    for key, want in zip(rows.keys, cast("list[int]", rows[GROUP_ROWS].tolist()), strict=True):
        if here[key.group] != want:
            raise ColumnError(
                f"group {key.group} has {want} rows and {here[key.group]} of them are in this batch: its statistics would be those "
                f"of another group; split batches between groups"
            )
