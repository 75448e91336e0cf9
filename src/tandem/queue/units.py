"""Storage units of the TransferQueue library: Ray actors, two a node, that keep rows' columns for whoever has their addresses.

Of the library this uses the units and their messages, at the version that the extra pins, and nothing of its controller, whose
part the ledger has. A unit answers over a TCP socket of its own, one request at a time, in the order of arrival; it asks nobody
for a password, and reads pickles: as with Ray itself, the cluster's network has to be one that can be trusted.

A value is the bytes of one column of one row: as tensors each would be a frame of its own, which costs more than its bytes. The
unit of a row follows from its ordinal, so that a group lies in one, and neighbours in different ones. A request whose answer
does not come is never sent again. A unit that is gone would never answer, so that after each `_LOOK_S` of silence its port is
tried: nobody listens there when its process has ended.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.data_proto import DataProto
from tandem.errors import QueueError, StalledError, WorkerError
from tandem.types import Key

_library: Any = importlib.import_module("transfer_queue.storage.simple_storage")  # untyped, and its extra need not be installed
_wire: Any = importlib.import_module("transfer_queue.utils.zmq_utils")
_zmq: Any = importlib.import_module("zmq.asyncio")
_ray: Any = importlib.import_module("ray")

_ANSWER_LIMIT_S = 120.0  # for one request, with those that the unit has before it
_LOOK_S = 2.0
_CONNECT_LIMIT_S = 10.0  # the kernel accepts, however busy the unit is
_START_LIMIT_S = 120.0
_PORT = "put_get_socket"
_A_NODE = 2  # as the library advises: one answers while another one is busy
# The library would take 8 threads a request, and say at each that there are fewer cores.
_ENVIRONMENT = {"TQ_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}


class Address(NamedTuple):
    """Where a unit answers."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"storage unit {self.name} ({self.host}:{self.port})"


class StorageUnits:
    """Implements queue.cluster.Units for any process of the cluster, and any event loop of it; pickles as the addresses."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.addresses = tuple(addresses)

    def __reduce__(self) -> tuple[type[StorageUnits], tuple[tuple[Address, ...]]]:
        return StorageUnits, (self.addresses,)

    async def put(self, rows: DataProto) -> None:
        if not rows.batch:
            return
        columns = {name: _by_row(rows, name) for name in rows.batch}

        async def put(address: Address, places: Sequence[int]) -> None:
            data = {name: [values[i] for i in places] for name, values in columns.items()}
            body = {"global_indexes": [str(rows.keys[i]) for i in places], "data": data, "data_parser": None}
            await self._ask(address, "PUT_DATA", body)

        await self._each(rows.keys, put)

    async def get(self, shapes: DataProto) -> DataProto:
        if not shapes.batch:
            return shapes
        found = {name: [b""] * len(shapes) for name in shapes.batch}

        async def get(address: Address, places: Sequence[int]) -> None:
            body = {"global_indexes": [str(shapes.keys[i]) for i in places], "fields": list(found)}
            data = (await self._ask(address, "GET_DATA", body))["data"]
            for name, values in found.items():
                for i, value in zip(places, data[name], strict=True):
                    values[i] = value

        await self._each(shapes.keys, get)
        joined = {name: _joined(values, name, shapes.batch[name]) for name, values in found.items()}
        return DataProto(shapes.keys, shapes.lengths, joined, shapes.token_level, shapes.non_tensor_batch)

    async def forget(self, keys: Collection[Key]) -> None:
        names = sorted(keys)

        async def forget(address: Address, places: Sequence[int]) -> None:
            await self._ask(address, "CLEAR_DATA", {"global_indexes": [str(names[i]) for i in places]})

        await self._each(names, forget)

    async def close(self) -> None:
        """Of a client: the units are their owner's."""

    async def _each(self, keys: Iterable[Key], ask: Callable[[Address, Sequence[int]], Awaitable[None]]) -> None:
        """Asks every unit that has some of these keys, with their positions."""
        parts: dict[Address, list[int]] = {}
        for i, key in enumerate(keys):
            parts.setdefault(self.addresses[key.ordinal % len(self.addresses)], []).append(i)
        await asyncio.gather(*(ask(address, places) for address, places in parts.items()))

    async def _ask(self, address: Address, what: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body of the unit's answer. Raises QueueError for what it refuses."""
        kinds = _wire.ZMQRequestType
        question = _wire.ZMQMessage.create(kinds[what], _identity(), dict(body), receiver_id=address.name)
        peer = _wire.ZMQServerInfo(None, address.name, address.host, {_PORT: address.port})
        try:
            async with asyncio.timeout(_ANSWER_LIMIT_S), _sockets().alease(peer) as socket:
                await socket.send_multipart(question.serialize(), copy=False)
                while not await socket.poll(_LOOK_S * 1000):
                    await _check_there(address)
                answer = _wire.ZMQMessage.deserialize(await socket.recv_multipart(copy=False))
        except TimeoutError:
            rows = len(body["global_indexes"])
            raise StalledError(
                f"{what} of {rows} rows has waited {_ANSWER_LIMIT_S:g} s for {address}, whose process lives: it is overloaded or "
                f"stopped. Look at that node, or let fewer bytes wait in the queue"
            ) from None
        if answer.request_type != kinds[f"{what}_RESPONSE"]:
            raise QueueError(f"{address} refuses {what} of rows {body['global_indexes'][0]}, ...: {answer.body.get('message')}")
        return answer.body


class RunningUnits(StorageUnits):
    """The owner's. actors: the units' actors, which go with its process if not before."""

    def __init__(self, addresses: Sequence[Address], actors: Sequence[Any]) -> None:
        super().__init__(addresses)
        self.actors = actors

    async def close(self) -> None:
        _sockets().close()
        if _ray.is_initialized():  # else they are gone
            _kill(self.actors)


async def start() -> RunningUnits:
    """The units, on each node of the cluster that this process is connected to.

    They take no logical cores: with one each, as the library has it, they would wait for ever where workers hold all of them.
    Raises WorkerError without a cluster, or where a unit does not start, and StalledError where it takes too long.
    """
    if not _ray.is_initialized():
        raise WorkerError("queue=ray needs a Ray cluster: enter the Ray runtime before the queue is used, or call ray.init()")
    nodes = sorted(node["NodeID"] for node in _ray.nodes() if node["Alive"])
    there = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    actors = [
        _library.SimpleStorageUnit.options(
            num_cpus=0, scheduling_strategy=there(node, soft=False), runtime_env={"env_vars": _ENVIRONMENT}
        ).remote({})
        for node in nodes
        for _ in range(_A_NODE)
    ]
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            infos = await asyncio.gather(*(actor.get_zmq_server_info.remote() for actor in actors))
    except TimeoutError:
        _kill(actors)
        raise StalledError(
            f"the {len(actors)} storage units of queue=ray, {_A_NODE} a node, did not start within {_START_LIMIT_S:g} s: "
            f"is a node short of memory?"
        ) from None
    except _ray.exceptions.RayError as error:
        _kill(actors)
        raise WorkerError(
            f"a storage unit of queue=ray did not start; every node needs the package transferqueue "
            f"(pip install 'tandem-rl[transferqueue]'): {' '.join(str(error).split())}"
        ) from error
    return RunningUnits([Address(info.id, info.ip, info.ports[_PORT]) for info in infos], actors)


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        _ray.kill(actor)


@cache
def _identity() -> str:
    """Units answer to nobody whose name begins otherwise."""
    return f"{_wire.STORAGE_MANAGER_IDENTITY_PREFIX}tandem_{os.getpid()}_{secrets.token_hex(4)}"


@cache
def _sockets() -> Any:
    """Of this process, for each event loop and unit some; one that an error or a deadline interrupts is not used again."""
    return _wire.ZMQSocketPool(_zmq.Context(), _identity(), _PORT)


async def _check_there(address: Address) -> None:
    """Raises WorkerError where nobody listens any more."""
    try:
        async with asyncio.timeout(_CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except OSError as error:
        raise WorkerError(
            f"{address} is gone, and with it the rows that it kept: its process or its node has ended ({error}). Go on from the "
            f"last snapshot with --resume"
        ) from error
    writer.close()


def _by_row(rows: DataProto, name: str) -> list[memoryview]:
    """The bytes of one column as they lie in memory, row by row."""
    tensor = rows.batch[name].detach().cpu().contiguous()
    memory: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    size = tensor.element_size() * math.prod(tensor.shape[1:])
    ends = rows.offsets if name in rows.token_level else range(len(rows) + 1)
    return [memory[size * a : size * b] for a, b in pairwise(ends)]


def _joined(values: Sequence[bytes], name: str, shape: Tensor) -> Tensor:
    """One column, as the books know it. Raises QueueError where the units have another."""
    memory = bytearray().join(values)
    if len(memory) != shape.nbytes:
        raise QueueError(
            f"the storage units have {len(memory)} bytes of column {name!r} and the books {shape.dtype} {list(shape.shape)}: "
            "somebody else writes there"
        )
    return torch.frombuffer(memory, dtype=shape.dtype).view(shape.shape) if memory else torch.empty_like(shape, device="cpu")
