"""Where the workers of a phase are: in this process, or in processes of their own, as the recipe's section `runtime` says.

A worker elsewhere is made there from a `Blueprint`, which has a model's shape; its weights come from a directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from tandem import device
from tandem.assemble.adapter import put_adapter
from tandem.data_proto import Join
from tandem.errors import ConfigError
from tandem.models.adapters import LoraConfig
from tandem.models.language_model import LanguageModel
from tandem.ports import Runtime, TrainEngine, TransferQueue, WorkerGroup
from tandem.queue.cluster import ClusterQueue, RowsApart
from tandem.registry import resolve
from tandem.runtime.inline import Inline
from tandem.runtime.placement import Beside, Rank, ResourcePool, SettledRuntime, place, seated, table
from tandem.runtime.pool import Runtime as Pools
from tandem.runtime.process import Processes
from tandem.runtime.queue_service import QueueServer, shared
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.source import Watch
from tandem.trainer.workers import ModelWorker, TrainWorker
from tandem.types import Algorithm

if TYPE_CHECKING:
    from tandem.runtime.ray import RayCluster
    from tandem.runtime.ray_queue import RayQueueServer

_RAY = {
    "ray": "tandem.runtime.ray:RayCluster",
    "queue of ray": "tandem.runtime.ray_queue:RayQueueServer",
}
_WHOLE, _SHARDED = "tandem.assemble.workers:whole", "tandem.assemble.sharded:sharded"


@dataclass(frozen=True)
class Blueprint:
    """A model without its weights. lora: of its adapter, if it has one, and the seed that this begins with."""

    kind: type[LanguageModel]
    config: Any  # of that kind
    dtype: torch.dtype
    lora: tuple[LoraConfig, int] | None = None

    @classmethod
    def of(cls, decoder: LanguageModel) -> Blueprint:
        adapter = decoder.adapter
        lora = (adapter.config, adapter.seed) if adapter is not None else None
        return cls(type(decoder), decoder.config, decoder.dtype, lora)

    def build(self) -> LanguageModel:
        model = self.kind.shaped(self.config, self.dtype)
        if self.lora is not None:
            put_adapter(model, *self.lora)
        return model

    def outline(self) -> LanguageModel:
        """On the meta device: names and shapes."""
        with torch.device("meta"):
            return self.build()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.outline().parameters())


@dataclass(frozen=True)
class Job:
    """What a worker is for. objective: the row that its model is trained for; None: it is only read. against: see TrainWorker."""

    role: str
    train: TrainConfig
    objective: Algorithm | None
    against: str | None = None


def whole(rank: Rank, model: LanguageModel | Blueprint, job: Job, queue: TransferQueue) -> ModelWorker:
    """The worker of a role that has one rank, which holds all of its model."""
    return worker(rank, TorchEngine(model.build() if isinstance(model, Blueprint) else model, job.train), job, queue)


def worker(rank: Rank, engine: TrainEngine, job: Job, queue: TransferQueue) -> ModelWorker:
    """One rank's worker, with its part of the role's model."""
    if job.objective is None:
        return ModelWorker(engine, queue)
    return TrainWorker(engine, queue, job.objective, job.role, ranks=rank.size, against=job.against)


def _alone(number: int) -> str:
    return f"rollout-{number}"


def joining(config: SettledRuntime) -> Join:
    """How the queue joins rows, in memory that is shown to the workers of this machine."""
    return torch.cat if config.name == "inline" else shared


class Workers:
    """The workers of one phase, for the length of an `async with`; groups are declared before.

    shared: their models are objects of this process, so that what trains one changes what others here read.
    """

    def __init__(self, config: SettledRuntime, queue: TransferQueue, logs: Path, alone: int = 0, *, turns: bool = False) -> None:
        """alone: so many workers have a pool of their own beside those of the config, and can be done without while one of them
        lives. turns: these and the others never compute at the same time, so that they may have the same cores.

        Raises DeviceError where this machine has less than the pools ask for; a cluster is asked when the workers start.
        """
        self._config, self._alone = config, alone
        own = [ResourcePool(_alone(number), 1, config.cores) for number in range(alone)]
        pools, spare = [*config.resource_pools, *own], [pool.name for pool in own]
        if taken := {pool.name for pool in own} & config.pools.keys():
            raise ConfigError(f"runtime.pools.{min(taken)} is the name of a rollout engine's own pool: choose another one")
        self._places: dict[str, str] = {}  # role -> pool
        self.shared = config.name == "inline"
        self._services: list[AbstractAsyncContextManager[Any, Any]] = []
        self._processes: Pools[Any] | None = None
        if self.shared:
            self._runtime: Runtime = Inline()
            self._queue = queue
        elif config.name == "process":
            here = device.hardware()
            self._seats = (*place(config.resource_pools, here), *place(own, here)) if turns else place(pools, here)
            self._runtime = self._processes = Processes(self._seats, logs, limit_s=config.limit_s, spare=spare)
            server = QueueServer(queue)
            self._services.append(server)
            self._queue = server.client()
        else:
            self._seats = seated(pools, "cpu")
            kinds = (resolve(name, _RAY, kind="runtime") for name in ("ray", "queue of ray"))
            cluster_type, server_type = cast("tuple[type[RayCluster], type[RayQueueServer]]", tuple(kinds))
            cluster = cluster_type(pools, logs, limit_s=config.limit_s, spare=spare)
            apart = isinstance(queue, ClusterQueue)
            serving = server_type(queue.books if apart else queue, cluster)
            self._runtime = self._processes = cluster
            self._services.append(serving)
            self._queue = RowsApart(serving.client()) if apart else serving.client()

    def group(self, model: LanguageModel | Blueprint, job: Job) -> WorkerGroup:
        """The workers of a role. model: a live one is used as it is where workers are shared, else copied without its weights.

        Raises ConfigError for more top_layers than the model has.
        """
        if job.train.top_layers:
            (model if isinstance(model, LanguageModel) else model.outline()).below(job.train.top_layers)
        if self.shared:
            return self._runtime.group(job.role, "", _WHOLE, model, job, self._queue)
        pool = self._pool(job.role)
        self._places[job.role] = pool
        blueprint = Blueprint.of(model) if isinstance(model, LanguageModel) else model
        if self._config.pools[pool] == 1:
            return self._runtime.group(job.role, pool, _WHOLE, blueprint, job, self._queue)
        return self._runtime.group(job.role, pool, _SHARDED, blueprint, job, self._queue, self._config, collectives=True)

    def alone(self, number: int, factory: str, *arguments: object) -> WorkerGroup:
        """The worker that has the `number`th pool of its own, so that its death ends no other, and a new one can be made."""
        self._places[_alone(number)] = _alone(number)
        return self._runtime.group(_alone(number), _alone(number), factory, *arguments)

    def beside(self, role: str, name: str, factory: str, *arguments: object) -> WorkerGroup:
        """A further worker, called `name`, in the processes of a role that has been declared, whose worker its factory is given."""
        return self._runtime.group(name, self._places[role], factory, Beside(role), *arguments)

    def check(self) -> None:
        """After the last group. Raises ConfigError for a pool that no role is in."""
        roles = [role for role, pool in self._places.items() if pool in self._config.pools]
        if idle := [name for name in self._config.pools if name not in self._places.values()] if not self.shared else []:
            raise ConfigError(
                f"runtime.pools.{idle[0]} has no role to hold: a pool of a role has its name ({', '.join(roles)}), "
                f"and all others are in pool 'trainer'"
            )

    @property
    def death(self) -> str:
        """Which process died first that nobody ended and nobody can do without, how, and the end of its log, as sentences; "" where
        none did. Also after the `async with`.
        """
        return self._processes.death if self._processes is not None else ""

    @property
    def lost(self) -> Watch | None:
        """What raises WorkerError as soon as there is a `death`; None where there is none that could alone."""
        return self._processes.lost if self._processes is not None else None

    def returned(self) -> list[int]:
        """Numbers of those alone that had died and are there again, in new processes, from now on; see pool.Runtime."""
        there = self._processes.returned() if self._processes is not None else []
        return [number for number in range(self._alone) if _alone(number) in there]

    def tell(self, tell: Callable[[str], None]) -> None:
        """Has it called with a sentence when one of those alone dies, and when it is there again."""
        if self._processes is not None:
            self._processes.tell = tell

    def describe(self) -> str:
        """Who goes where: a line a process."""
        return table(self._seats, self._places) if not self.shared else "all models in this process"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for service in (*self._services, self._runtime):
                await stack.enter_async_context(service)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._open.aclose()

    def _pool(self, role: str) -> str:
        pools: Mapping[str, int] = self._config.pools
        if role in pools or "trainer" in pools:
            return role if role in pools else "trainer"
        raise ConfigError(
            f"runtime.pools={dict(pools)} has no place for role {role!r}: give it a pool of its own name, or one called 'trainer'"
        )
