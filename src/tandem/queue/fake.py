"""A TransferQueue for tests: never full, and it never waits. What a real one would wait for raises StalledError at once."""

from tandem.queue.memory import MemoryQueue, QueueConfig


class FakeQueue(MemoryQueue):
    """The rules of the port without time: the outcome of a test cannot depend on its speed."""

    def __init__(self) -> None:
        super().__init__(QueueConfig(max_groups=1 << 31, stall_limit_s=0.0))
