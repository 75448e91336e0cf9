from __future__ import annotations

import asyncio
import threading

from tandem import stacks


async def _waits_in(event: asyncio.Event) -> None:
    await event.wait()


async def _generates(event: asyncio.Event) -> None:
    async def numbers():  # type: ignore[no-untyped-def]
        await event.wait()
        yield 1

    async for _ in numbers():
        pass


def test_tasks_that_wait_at_one_place_are_named_together_and_threads_beside_them() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="a thread")
    thread.start()

    async def scenario() -> str:
        event = asyncio.Event()
        tasks = [asyncio.create_task(_waits_in(event), name=f"waiter {i}") for i in range(6)]
        tasks.append(asyncio.create_task(_generates(event), name="generator"))
        await asyncio.sleep(0)
        said = stacks.of_tasks()
        event.set()
        await asyncio.gather(*tasks)
        return said

    said = asyncio.run(scenario())
    stop.set()
    thread.join()
    assert "waiter 0, waiter 1, waiter 2, waiter 3 and 2 more:\n" in said
    assert said.count("in _waits_in\n    await event.wait()\n") == 1
    assert "generator:\n" in said
    assert "async for _ in numbers()" in said
    assert "thread a thread:\n" in said
    assert "scenario" not in said.partition("thread a thread")[0], "whoever asks is not among those that wait"
