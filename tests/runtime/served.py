"""Queues that are served from a thread of its own, and their clients here: for the tests of what a client must keep."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tandem.ports import TransferQueue, WorkerGroup
from tandem.queue.cluster import ClusterQueue, RowsApart
from tandem.runtime.placement import ResourcePool
from tandem.runtime.queue_service import Asked, QueueClient, QueueServer, RemoteQueue
from tandem.runtime.ray import RayCluster
from tandem.runtime.ray_queue import RayQueueClient, RayQueueServer
from tests.runtime.ray_cluster import cluster
from tests.runtime.workers import Worker


@cache
def owner() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def near(server: RayQueueServer) -> RayQueueClient:
    """A client as the server's own machine has it."""
    return server.client()


def far(server: RayQueueServer) -> RayQueueClient:
    """A client as another machine has it, where nobody serves the queue."""
    return RayQueueClient(server.client().name, QueueClient("elsewhere"))


def served(make: Callable[[], TransferQueue]) -> QueueClient:
    async def serve() -> QueueClient:
        return (await QueueServer(make()).__aenter__()).client()

    return asyncio.run_coroutine_threadsafe(serve(), owner()).result(10)


class ByRay(RemoteQueue):
    """A queue as a worker in a Ray actor has it, for a test in this process: each call is made there."""

    def __init__(self, group: WorkerGroup, client: TransferQueue) -> None:
        self._group, self._client = group, client

    async def ask(self, asked: Asked) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._there(asked), owner()))

    def _ask_blocking(self, asked: Asked) -> Any:
        return asyncio.run_coroutine_threadsafe(self._there(asked), owner()).result()

    async def _there(self, asked: Asked) -> Any:
        return await self._group.call(Worker.through, self._client, *asked)


@cache
def _ray() -> tuple[RayCluster, WorkerGroup]:
    """One runtime for all queues, which goes with the process."""
    cluster()
    runtime = RayCluster([ResourcePool("queues", 1)], Path(mkdtemp()))
    group = runtime.group("queues", "queues", "tests.runtime.workers:Worker")
    asyncio.run_coroutine_threadsafe(runtime.__aenter__(), owner()).result(60)
    return runtime, group


_SERVERS = 8  # that are open at once, since calls of each wait in the actor; more than one test uses
_servers: list[RayQueueServer] = []


def served_by_ray(make: Callable[[], TransferQueue], where: Callable[[RayQueueServer], RayQueueClient]) -> ByRay:
    runtime, group = _ray()

    async def serve() -> TransferQueue:
        queue = make()
        server = RayQueueServer(queue.books if isinstance(queue, ClusterQueue) else queue, runtime)
        _servers.append(await server.__aenter__())
        if len(_servers) > _SERVERS:
            await _servers.pop(0).__aexit__(None, None, None)
        return RowsApart(where(server)) if isinstance(queue, ClusterQueue) else where(server)

    return ByRay(group, asyncio.run_coroutine_threadsafe(serve(), owner()).result(10))
