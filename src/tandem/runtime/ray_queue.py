"""A TransferQueue for workers in Ray actors: the controller owns the queue and serves it, and they ask through a mailbox.

Nobody can call the controller, so an actor beside it takes the questions, and the controller fetches them:

    worker -- ask --> Mailbox <-- questions, answer -- controller, queue

Columns do not pass through the mailbox: they lie in the object stores of the nodes, and what is asked and answered says where.
Rows that a worker wrote stay in the store, where its controller reads them, until the queue lets them go.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.errors import WorkerError
from tandem.ports import TransferQueue
from tandem.runtime.keeper import Mailbox
from tandem.runtime.objects import Actor, Handed, answer, fetched, opened, packed, stored, unpacked, untyped
from tandem.runtime.queue_service import Asked, RemoteQueue, perform
from tandem.runtime.ray import connected

_NAMESPACE = "tandem"


class RayQueueServer:
    """Serves a queue to the workers of a RayCluster from the running event loop, for the length of an `async with`.

    address: of the Ray cluster, as for RayCluster, which is entered inside.
    """

    def __init__(self, queue: TransferQueue, *, address: str | None = None) -> None:
        self._queue = queue
        self._address = address
        self._name = f"queue-{os.getpid()}-{secrets.token_hex(8)}"
        self._asking: dict[Actor | None, set[asyncio.Task[None]]] = {}
        self._watching: set[asyncio.Task[None]] = set()

    def client(self) -> RayQueueClient:
        """A client to be sent to workers; it connects where it is first used, while the queue is served."""
        return RayQueueClient(self._name)

    async def __aenter__(self) -> Self:
        with ExitStack() as undo:
            undo.enter_context(connected(self._address))
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            beside = untyped.remote(name=self._name, namespace=_NAMESPACE, num_cpus=0, scheduling_strategy=here)
            self._mailbox: Actor = beside(Mailbox).remote()
            undo.callback(untyped.kill, self._mailbox)
            await self._mailbox.__ray_ready__.remote()
            self._undo = undo.pop_all()
        self._serving = asyncio.ensure_future(self._serve())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tasks = {self._serving, *self._watching, *(task for tasks in self._asking.values() for task in tasks)}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._undo.close()

    async def _serve(self) -> None:
        while True:
            for number, (asker, handed) in await self._mailbox.questions.remote():
                if asker not in self._asking:
                    self._asking[asker] = set()
                    if asker is not None:
                        self._watching.add(asyncio.ensure_future(self._forget(asker)))
                task = asyncio.ensure_future(self._answer(number, handed))
                self._asking[asker].add(task)
                task.add_done_callback(self._asking[asker].discard)

    async def _answer(self, number: int, handed: Handed) -> None:
        async def result() -> object:
            return await perform(self._queue, *unpacked(await fetched(handed)))

        fine, value = await answer(result())
        await self._mailbox.answer.remote(number, (fine, await stored(value)))

    async def _forget(self, asker: Actor) -> None:
        """When a worker is gone, what it still waits for must not be given to it."""
        try:
            await asker.live.remote()
        except RayActorError:
            for task in self._asking[asker]:
                task.cancel()


class RayQueueClient(RemoteQueue):
    """A client of a RayQueueServer; pickles as its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._connected: tuple[Actor, Actor | None] | None = None  # the mailbox, and the worker that asks

    def __reduce__(self) -> tuple[type[RayQueueClient], tuple[str]]:
        return RayQueueClient, (self._name,)

    async def _ask(self, asked: Asked) -> Any:
        value = await stored(packed(asked))
        try:
            mailbox, asker = self._link()
            fine, handed = await mailbox.ask.remote((asker, value))
            return opened((fine, await fetched(handed)))
        except RayActorError as error:
            raise self._gone() from error

    def _ask_blocking(self, asked: Asked) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._ask(asked)).result()

    def _link(self) -> tuple[Actor, Actor | None]:
        if self._connected is None:
            try:
                mailbox = untyped.get_actor(self._name, namespace=_NAMESPACE)
            except ValueError:
                raise self._gone() from None
            context = ray.get_runtime_context()
            self._connected = mailbox, context.current_actor if context.get_actor_id() else None
        return self._connected

    def _gone(self) -> WorkerError:
        return WorkerError(f"the queue {self._name} is not served any more: its process has ended, or closed it")
