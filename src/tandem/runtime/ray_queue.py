"""A TransferQueue for workers in Ray actors: the controller owns the queue and serves it, and they fetch and write by handle.

Workers on the machine of the controller ask as processes of that machine do (queue_service.py), through shared memory. From
others nobody can call the controller, so that it calls them: a worker leaves its questions in its own process, and the
controller has calls waiting there which bring a question each, and calls again with the answer.

    worker -- ask --> Mailbox -- question --> controller, queue
           <--------- Mailbox <-- answer ----

What is big is the result or an argument of those calls, which Ray hands over through the object stores of the nodes. Rows that
a worker wrote stay in the store, where its controller reads them, until the queue lets them go.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayActorError

from tandem.errors import WorkerError
from tandem.ports import TransferQueue
from tandem.runtime.mailbox import mailbox
from tandem.runtime.objects import Actor, Packed, answer, opened, packed, stored, unpacked
from tandem.runtime.queue_service import Asked, QueueClient, QueueServer, RemoteQueue, perform
from tandem.runtime.ray import RayCluster

_FETCHES = 2  # calls that wait for a question of a worker, so that the next one finds a call too


class RayQueueServer:
    """Serves a queue to the workers of a Ray runtime from the running event loop, for the length of an `async with`."""

    def __init__(self, queue: TransferQueue, runtime: RayCluster) -> None:
        self._queue = queue
        self._near = QueueServer(queue)
        self._runtime = runtime
        self._name = f"queue-{os.getpid()}-{secrets.token_hex(8)}"
        self._serving: dict[Actor, asyncio.Task[None]] = {}

    def client(self) -> RayQueueClient:
        """A client to be sent to the runtime's workers."""
        return RayQueueClient(self._name, self._near.client())

    async def __aenter__(self) -> Self:
        await self._near.__aenter__()
        self._runtime.listen(self._listen)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._near.__aexit__(kind, error, trace)
        self._runtime.ignore(self._listen)
        for actor, task in self._serving.items():
            task.cancel()
            if self._runtime.running and not task.done():
                actor.close.remote(self._name)
        for ended in await asyncio.gather(*self._serving.values(), return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    def _listen(self, actor: Actor) -> None:
        self._serving[actor] = asyncio.ensure_future(self._serve(actor))

    async def _serve(self, actor: Actor) -> None:
        """Until the worker is gone: what it still waits for must not be given to it then."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_FETCHES):
                    group.create_task(self._fetch(actor, group))
        except* RayActorError:
            pass

    async def _fetch(self, actor: Actor, group: asyncio.TaskGroup) -> None:
        while True:
            number, value = await actor.question.remote(self._name)
            group.create_task(self._answer(actor, number, value))

    async def _answer(self, actor: Actor, number: int, value: Packed) -> None:
        async def result() -> object:
            return await perform(self._queue, *unpacked(value))

        fine, given = await answer(result())
        await actor.answer.remote(self._name, number, fine, await stored(given))


class RayQueueClient(RemoteQueue):
    """A client of a RayQueueServer, for the workers of its runtime; pickles as where that is.

    near: asks it where it is on this machine, which it is when somebody answers there.
    """

    def __init__(self, name: str, near: QueueClient) -> None:
        self.name, self._near = name, near

    async def ask(self, asked: Asked) -> Any:
        if ray.get_runtime_context().get_actor_id() is None:
            raise WorkerError("a client of a queue in Ray is for the runtime's workers; its owner has the queue itself")
        if self._near.connects():
            return await self._near.ask(asked)
        try:
            return opened(await asyncio.wrap_future(mailbox(self.name).ask(packed(asked))))
        except ConnectionError:
            raise WorkerError(f"the queue {self.name} is not served any more: its owner has closed it") from None

    def _ask_blocking(self, asked: Asked) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self.ask(asked)).result()
