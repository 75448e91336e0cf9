"""The runtime of a cluster: ranks are Ray actors, a call is a call of an actor, and columns travel through the object store.

Ray places the processes, carries messages and columns between nodes and notices deaths; what a call promises is the pool's
own. The pools are one placement group: all ranks have their cores and devices, on as few nodes as possible, or none starts.
Tandem's own actors take no logical cores, so that they never wait for the workers that they serve.

A Ray that somebody has started (`ray start`, RAY_ADDRESS, or ray.init in this process) is joined; where there is none, one
is started on this machine, and only that one is shut down in the end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tandem.device import Address, Hardware, Kind
from tandem.errors import DeviceError, StalledError, WorkerError
from tandem.runtime import keeper
from tandem.runtime.keeper import LOG_LINES, STACK_LINES, Keeper
from tandem.runtime.objects import Actor, Ref, packed, result, stored, untyped
from tandem.runtime.placement import ResourcePool, Seat, check
from tandem.runtime.pool import Pool, Runtime
from tandem.runtime.ray_actor import WATCH, Place, WorkerActor
from tandem.runtime.worker import Open, Order

_RESOURCES: dict[Kind, str] = {"cuda": "GPU", "npu": "NPU"}
_WATCHERS = 100  # calls beside the workers' own that wait in an actor at once: two for a queue, one for its end, and stacks
_PLACE_LIMIT_S = 30.0  # that other users of a cluster have to leave room
_START_LIMIT_S = 120.0
_ASK_LIMIT_S = 2.0  # that an actor has to say where it stands, or what a log says
_DUMP_S = 0.2
_STRANGER = (
    "Ray lets go of the actors of a process whose token it does not know: RAY_AUTH_MODE must be the same here as where the cluster "
    "was started (unset, it is token for who has a file ~/.ray/auth_token)"
)
_KILL_LIMIT_S = 10.0

cloudpickle.register_pickle_by_value(keeper)


@contextmanager
def connected(address: str | None) -> Generator[None]:
    """Joins a Ray cluster or starts one; see the module's docstring. Raises WorkerError where there is none at `address`."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        where = f"the Ray cluster at {address}" if address else "a Ray cluster"
        raise WorkerError(f"{where} cannot be joined or started: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def cluster() -> dict[str, Hardware]:
    """What each node of the cluster has, by its name and the start of its id."""
    return {
        f"{node['NodeManagerHostname']} {node['NodeID'][:8]}": _hardware(node["Resources"])
        for node in untyped.nodes()
        if node["Alive"]
    }


def _hardware(has: Mapping[str, float]) -> Hardware:
    found = [Hardware(int(has.get("CPU", 0)), kind, int(has[name])) for kind, name in _RESOURCES.items() if name in has]
    return found[0] if found else Hardware(int(has.get("CPU", 0)))


class RayCluster(Runtime["_RayPool"]):
    """The Ray runtime.

    logs: a directory on every node, for one file a process of that node. limit_s: how long a call may wait while no rank
    answers; longer than the slowest step. address: of the cluster; see the module's docstring. running: whether its actors can
    be called. spare: pools that can be done without as long as one of them lives.

    Entering it raises DeviceError where the pools ask for more than the cluster has, before anything starts.
    """

    def __init__(
        self,
        pools: Sequence[ResourcePool],
        logs: Path,
        *,
        limit_s: float = 600.0,
        address: str | None = None,
        spare: Collection[str] = (),
    ) -> None:
        self.running = False
        self._address = address
        self._wanted = tuple(pools)
        self._listeners: list[Callable[[Actor], None]] = []
        super().__init__({pool.name: _RayPool(pool, logs.absolute(), limit_s, self._listeners) for pool in pools}, spare)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Who went where, once the runtime is entered."""
        return tuple(seat for pool in self._pools.values() for seat in pool.seats)

    def listen(self, listener: Callable[[Actor], None]) -> None:
        """Has it called with every actor that runs, and with every one that is started later."""
        self._listeners.append(listener)
        for pool in self._pools.values():
            pool.introduce(listener)

    def ignore(self, listener: Callable[[Actor], None]) -> None:
        """From now on it is called no more."""
        self._listeners.remove(listener)

    async def _prepare(self, undo: AsyncExitStack) -> None:
        undo.enter_context(connected(self._address))
        self.running = True
        undo.callback(self._stopped)
        there = cluster()
        check(self._wanted, there)
        kinds: list[Kind] = [has.kind for has in there.values() if has.devices]
        kind = kinds[0] if kinds else "cpu"
        bundles = [_bundle(pool, kind) for pool in self._wanted for _ in range(pool.ranks)]
        group = placement_group(bundles, strategy="PACK")
        undo.callback(remove_placement_group, group)
        if not await asyncio.to_thread(group.wait, _PLACE_LIMIT_S):
            asked = ", ".join(f"{pool.name} {pool.ranks} x ({pool.cores} cores, {pool.devices} devices)" for pool in self._wanted)
            left: Mapping[str, float] = untyped.available_resources()
            free = ", ".join(f"{left.get(name, 0):g} {name}" for name in ("CPU", *_RESOURCES.values()))
            raise DeviceError(
                f"the cluster is large enough for {asked}, but within {_PLACE_LIMIT_S:g} s there was no room for all: "
                f"{free} are free. Ask for less, or wait until others are done"
            )
        nodes: Mapping[int, str] = untyped.util.placement_group_table(group)["bundles_to_node_id"]
        keepers = {node: self._keeper(node, undo) for node in set(nodes.values())}
        first = 0
        for pool in self._wanted:
            bundle = [(index, keepers[nodes[index]]) for index in range(first, first + pool.ranks)]
            self._pools[pool.name].reserve(group, bundle, kind)
            first += pool.ranks

    def _stopped(self) -> None:
        self.running = False

    @staticmethod
    def _keeper(node: str, undo: AsyncExitStack) -> Actor:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        actor: Actor = untyped.remote(num_cpus=0, scheduling_strategy=there)(Keeper).remote()
        undo.callback(untyped.kill, actor)
        return actor


def _bundle(pool: ResourcePool, kind: Kind) -> dict[str, float]:
    devices = {_RESOURCES[kind]: float(pool.devices)} if pool.devices else {}
    return {"CPU": float(pool.cores), **devices}


@dataclass(frozen=True, slots=True)
class _Actor:
    """A WorkerActor. living: its call that ends with it. numbers: of the orders that it gets."""

    actor: Actor
    living: Ref
    place: Place
    log: Path
    keeper: Actor
    numbers: Iterator[int] = field(default_factory=count)

    def __str__(self) -> str:
        return f"rank {self.place.seat.rank} (process {self.place.pid} on {self.place.seat.node})"

    async def stacks(self) -> str:
        """From the thread beside the workers'; where that has no turn, from the signal that dumps all threads."""
        try:
            async with asyncio.timeout(_ASK_LIMIT_S):
                return await self.actor.stacks.remote()
        except (TimeoutError, RayActorError):
            self.keeper.dump.remote(self.place.pid)
            await asyncio.sleep(_DUMP_S)
            log = await self.log_end(STACK_LINES)
            return f"it does not say where it stands: stopped, or in native code that keeps the interpreter. {log}"

    async def death(self) -> str:
        try:
            await self.living
        except RayError as error:
            _, _, detail = str(error).splitlines()[-1].rpartition("detail: ")
            return f"died (Ray: {detail.partition(' Some common causes')[0].rstrip('.')})"
        raise AssertionError("this call has no other end")

    async def log_end(self, num_lines: int = LOG_LINES) -> str:
        try:
            async with asyncio.timeout(_ASK_LIMIT_S):
                return await self.keeper.log_end.remote(self.log, num_lines)
        except (TimeoutError, RayActorError):
            return f"{self.log} cannot be read: its node does not answer."


class _RayPool(Pool[_Actor]):
    def __init__(self, pool: ResourcePool, logs: Path, limit_s: float, listeners: Sequence[Callable[[Actor], None]]) -> None:
        super().__init__(pool.name, pool.ranks, limit_s)
        self._listeners = listeners
        self._wanted = pool
        self._logs = logs
        self._actors: list[Actor] = []

    def reserve(self, group: PlacementGroup, bundles: Sequence[tuple[int, Actor]], kind: Kind) -> None:
        """Where its actors go: bundles of the placement group, each with the keeper of its node."""
        self._group = group
        self._bundles = bundles
        self._kind: Kind = kind

    def again(self) -> _RayPool:
        pool = _RayPool(self._wanted, self._logs, self._limit_s, self._listeners)
        pool.reserve(self._group, self._bundles, self._kind)
        return pool

    def introduce(self, listener: Callable[[Actor], None]) -> None:
        for member in self._members:
            listener(member.actor)

    @property
    def seats(self) -> list[Seat]:
        return [member.place.seat for member in self._members]

    async def _start(self) -> None:
        pool, kind = self._wanted, self._kind
        given = {_RESOURCES[kind]: pool.devices} if pool.devices else {}
        make: Any = untyped.remote(
            num_cpus=pool.cores, num_gpus=given.pop("GPU", 0), resources=given, concurrency_groups={WATCH: _WATCHERS}
        )(WorkerActor)
        logs = [self._logs / f"{pool.name}-{rank}.log" for rank in range(pool.ranks)]
        for rank, (bundle, _) in enumerate(self._bundles):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            started = make.options(scheduling_strategy=where).remote(pool, rank, kind, logs[rank], sys.path, Path.cwd())
            self._actors.append(started)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                places: list[Place] = await asyncio.gather(*(actor.place.remote() for actor in self._actors))
        except TimeoutError:
            raise StalledError(
                f"pool {pool.name!r}: its {pool.ranks} actors did not start within {_START_LIMIT_S:g} s: is a node short of memory?"
            ) from None
        except RayError as error:
            stranger = f". {_STRANGER}" if "never ran" in str(error) else ""
            raise WorkerError(f"pool {pool.name!r}: an actor did not start: {' '.join(str(error).split())}{stranger}") from error
        for actor, place, log, (_, its_keeper) in zip(self._actors, places, logs, self._bundles, strict=True):
            self._add(_Actor(actor, actor.live.remote(), place, log, its_keeper))
        for listener in self._listeners:
            self.introduce(listener)

    async def _meet(self) -> Address:
        return (
            await self.order(f"pool {self._name}: a place to meet", [Open(self._members[0].place.host, self._limit_s)], stuck=False)
        )[0]

    async def _send(self, orders: Sequence[Order]) -> list[asyncio.Future[Any]]:
        distinct = {id(order): order for order in orders}
        handed = dict(zip(distinct, await asyncio.gather(*(stored(packed(order)) for order in distinct.values())), strict=True))
        calls = zip(self._members, [handed[id(order)] for order in orders], strict=False)
        return [asyncio.ensure_future(result(member.actor.obey.remote(next(member.numbers), value))) for member, value in calls]

    async def _kill(self) -> str:
        if not ray.is_initialized():  # it was shut down, with all actors; Ray would start another one to be asked
            return ""
        for actor in self._actors:
            untyped.kill(actor)  # with all that it started
        going = [asyncio.ensure_future(member.death()) for member in self._members]
        _, stuck = await asyncio.wait(going, timeout=_KILL_LIMIT_S) if going else ((), ())
        for task in stuck:
            task.cancel()
        return f"; {len(stuck)} of {len(self)} actors were killed and do not end" if stuck else ""
