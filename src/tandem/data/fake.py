"""A dataset made of the tasks it is given."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.types import Message, Task


class FakeDataset:
    """Implements the Dataset port. Without tasks: `size` of them, task i asking "i" and answered by "i"."""

    def __init__(self, tasks: Sequence[Task] | None = None, *, size: int = 8, name: str = "fake") -> None:
        self.name = name
        self._tasks = tuple(Task(f"{name}-{i}", (Message("user", str(i)),), str(i), name) for i in range(size))
        if tasks is not None:
            self._tasks = tuple(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]
