"""Queues that are served from a thread of its own, and their clients here: for the tests of what a client must keep."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache

from tandem.ports import TransferQueue
from tandem.runtime.queue_service import QueueClient, QueueServer
from tandem.runtime.ray_queue import RayQueueClient, RayQueueServer
from tests.runtime.ray_cluster import cluster


@cache
def owner() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def served(make: Callable[[], TransferQueue]) -> QueueClient:
    async def serve() -> QueueClient:
        return (await QueueServer(make()).__aenter__()).client()

    return asyncio.run_coroutine_threadsafe(serve(), owner()).result(10)


@contextmanager
def serving_by_ray() -> Generator[Callable[[Callable[[], TransferQueue]], RayQueueClient]]:
    """The same through Ray's mailboxes, each of which is a process, until the end."""
    cluster()
    servers: list[RayQueueServer] = []

    async def serve(make: Callable[[], TransferQueue]) -> RayQueueClient:
        servers.append(await RayQueueServer(make()).__aenter__())
        return servers[-1].client()

    async def close() -> None:
        for server in servers:
            await server.__aexit__(None, None, None)

    yield lambda make: asyncio.run_coroutine_threadsafe(serve(make), owner()).result(30)
    asyncio.run_coroutine_threadsafe(close(), owner()).result(30)
