"""Fakes for tests: a TransferQueue that is never full and never waits, and storage units in this process."""

from collections.abc import Collection
from dataclasses import replace

from tandem.data_proto import DataProto
from tandem.errors import QueueError
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.types import Key


class FakeQueue(MemoryQueue):
    """The rules of the port without time: the outcome of a test cannot depend on its speed. What a real one would wait for raises
    StalledError at once.
    """

    def __init__(self) -> None:
        super().__init__(QueueConfig(max_groups=1 << 31, stall_limit_s=0.0))


class FakeUnits:
    """Implements queue.cluster.Units. rows: what is kept, each row by itself."""

    def __init__(self) -> None:
        self.rows: dict[Key, DataProto] = {}

    async def start(self) -> "FakeUnits":
        return self

    async def put(self, rows: DataProto) -> None:
        for part in rows.only(rows.batch).chunk(len(rows)):
            (key,) = part.keys
            self.rows[key] = self.rows[key].join(part) if key in self.rows else part

    async def get(self, shapes: DataProto) -> DataProto:
        if not shapes.batch:
            return shapes
        if missing := [key for key in shapes.keys if key not in self.rows]:
            raise QueueError(f"nothing is kept of row {missing[0]}")
        found = [self.rows[key].only(shapes.batch) for key in shapes.keys]
        whole = (
            DataProto.concat(found).batch
            if found
            else {name: tensor.new_empty(0, device="cpu") for name, tensor in shapes.batch.items()}
        )
        return replace(shapes, batch=whole)

    async def forget(self, keys: Collection[Key]) -> None:
        for key in keys:
            self.rows.pop(key, None)

    async def close(self) -> None:
        self.rows.clear()
