"""A queue that is served from a thread of its own, and its client here: for the tests of what a client must keep."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import cache

from tandem.ports import TransferQueue
from tandem.runtime.queue_service import QueueClient, QueueServer


@cache
def owner() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def served(make: Callable[[], TransferQueue]) -> QueueClient:
    async def serve() -> QueueClient:
        return (await QueueServer(make()).__aenter__()).client()

    return asyncio.run_coroutine_threadsafe(serve(), owner()).result(10)
