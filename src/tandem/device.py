"""What hardware there is: placement, dtypes, synchronisation, memory, collectives. The only file that asks.

It does not move models or decide batch sizes, and it has no streams yet: nothing here overlaps copies with compute.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import resource
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] documented there
from torch.distributed.device_mesh import DeviceMesh

from tandem import __version__
from tandem.errors import DeviceError, StalledError, TandemError

Kind = Literal["cpu", "cuda", "npu"]

_MAX_THREADS = 1024  # OpenMP ends the process where it cannot start as many threads as it is told
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COLLECTIVES: dict[Kind, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_VISIBLE: dict[Kind, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_ABSENT = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer")  # how gloo says that a rank is not there


def _accelerator(kind: Kind) -> ModuleType | None:
    """torch.cuda or torch.npu where at least one such device answers."""
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            return None
        importlib.import_module("torch_npu")
    module: ModuleType = getattr(torch, kind)
    return module if module.is_available() and module.device_count() > 0 else None


@dataclass(frozen=True, slots=True)
class Memory:
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Device:
    """One place to put tensors. `index` counts devices of its kind; the CPU is index 0."""

    kind: Kind
    index: int = 0

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def collectives(self) -> str:
        """The torch.distributed back-end for tensors that live here."""
        return _COLLECTIVES[self.kind]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype called `name` ("fp32", "bf16", "fp16"); DeviceError where this device does not compute in it."""
        usable = [each for each, dtype in DTYPES.items() if self.supports(dtype)]
        if name not in usable:
            raise DeviceError(f"dtype {name!r} is not usable on {self.torch}; use one of: {', '.join(usable)}")
        return DTYPES[name]

    def supports(self, dtype: torch.dtype) -> bool:
        """True where arithmetic in `dtype` is native; float16 on a CPU is emulated and far too slow."""
        if self.kind == "cpu":
            return dtype != torch.float16
        module = _accelerator(self.kind)
        return dtype != torch.bfloat16 or (module is not None and bool(module.is_bf16_supported()))

    def synchronize(self) -> None:
        """Waits until all work queued here is done."""
        module = _accelerator(self.kind) if self.kind != "cpu" else None
        if module is not None:
            module.synchronize(self.index)

    def memory(self) -> Memory:
        """What is free and what there is; on the CPU, of the machine's main memory."""
        module = _accelerator(self.kind) if self.kind != "cpu" else None
        if module is not None:
            free, total = module.mem_get_info(self.index)
            return Memory(int(free), int(total))
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)

    def moved(self, tensor: Tensor, where: Literal["device", "host"]) -> Tensor:
        """The tensor here, or in the host's memory: itself where it is there already, as it always is on the CPU."""
        return tensor.to(self.torch if where == "device" else "cpu")

    def held_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Of the memory of these that is here, what they share once; 0 for the CPU, whose memory is the host's."""
        if self.kind == "cpu":
            return 0
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.device == self.torch]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


CPU = Device("cpu")


def select(name: str = "auto") -> Device:
    """The device called `name`: "auto" (an accelerator if there is one, else the CPU), "cpu", "cuda", "cuda:1", "npu".

    Raises DeviceError for hardware that is not there and for a name that means none.
    """
    kinds: tuple[Kind, ...] = ("cuda", "npu", "cpu")
    if name == "auto":
        return next(Device(kind) for kind in kinds if kind == "cpu" or _accelerator(kind) is not None)
    base, colon, number = name.partition(":")
    known: dict[str, Kind] = {kind: kind for kind in kinds}
    kind = known.get(base)
    if kind is None or (colon and (kind == "cpu" or not number.isdecimal())):
        raise DeviceError(f"device {name!r} is not known; use auto, cpu, cuda, cuda:N, npu or npu:N")
    index = int(number or 0)
    if kind != "cpu":
        module = _accelerator(kind)
        found = 0 if module is None else int(module.device_count())
        if index >= found:
            raise DeviceError(f"{name} asked for, {found or 'none'} found; use device=cpu" + (f" or {kind}:0" if found else ""))
    return Device(kind, index)


def configure_threads(count: int = 0) -> int:
    """Sets how many threads one CPU operation may use (0 keeps torch's own choice); returns the number in force."""
    if count < 0:
        raise DeviceError(f"threads={count} is negative; use 0 for torch's own choice, or the number of cores to use")
    if count > _MAX_THREADS:
        raise DeviceError(f"threads={count} is above {_MAX_THREADS}; use the number of cores, here {os.cpu_count()}")
    if count:
        torch.set_num_threads(count)
    return torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this process may use of this machine. `kind` and number of its accelerators, which may be 0 of "cpu"."""

    cores: int
    kind: Kind = "cpu"
    devices: int = 0


def hardware() -> Hardware:
    """What is there, the first kind of accelerator that answers."""
    cores = len(os.sched_getaffinity(0))
    kinds: tuple[Kind, ...] = ("cuda", "npu")
    for kind in kinds:
        if (module := _accelerator(kind)) is not None:
            return Hardware(cores, kind, int(module.device_count()))
    return Hardware(cores)


def visible(kind: Kind, devices: Sequence[int | str]) -> dict[str, str]:
    """The environment in which a process sees these accelerators and no other; it counts them from 0."""
    return {} if kind == "cpu" else {_VISIBLE[kind]: ",".join(map(str, devices))}


@dataclass(frozen=True, slots=True)
class Address:
    """Where ranks on several machines meet: a store that `open_store` serves."""

    host: str
    port: int


def open_store(host: str, limit_s: float) -> TCPStore:
    """Serves a store at a free port of this machine, as long as it is kept; `host` is how the other ranks reach this one."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s))


def join(device: Device, rank: int, size: int, meet: Path | Address, limit_s: float) -> None:
    """Makes this process `rank` of `size` in the default process group, for collectives on tensors of `device`'s kind.

    The ranks meet at a file or at a store, which no group has used before. Raises StalledError where they are not all there
    within `limit_s`, which later limits every collective too.
    """
    limit = timedelta(seconds=limit_s)
    try:
        store = (
            TCPStore(meet.host, meet.port, is_master=False, timeout=limit)
            if isinstance(meet, Address)
            else FileStore(str(meet), size)
        )
        dist.init_process_group(device.collectives, store=store, rank=rank, world_size=size, timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        raise StalledError(
            f"rank {rank} waits for {size} ranks to meet at {meet}, and they did not in {limit_s:g} s: {error}"
        ) from error


def mesh(device: Device, replicas: int, limit_s: float) -> DeviceMesh:
    """All ranks as a table of axes "replica" and "shard": `replicas` rows of neighbours. limit_s: of each collective along an axis.

    Every rank calls it, after `join`. Raises DeviceError where the ranks do not fill the table.
    """
    size = dist.get_world_size()
    if replicas < 1 or size % replicas:
        raise DeviceError(f"replicas={replicas} does not divide the {size} ranks that hold the model; use a divisor of {size}")
    table = torch.arange(size).view(replicas, -1)
    limit = timedelta(seconds=limit_s)
    groups = [
        cast("dist.ProcessGroup", dist.new_subgroups_by_enumeration(rows.tolist(), timeout=limit)[0]) for rows in (table.t(), table)
    ]
    return DeviceMesh.from_group(groups, device.kind, mesh=table, mesh_dim_names=("replica", "shard"))


def group_apart(limit_s: float) -> dist.ProcessGroup:
    """All ranks once more, on the host, for what meets beside the calls of the default group. Every rank calls it, after `join`."""
    return cast("dist.ProcessGroup", dist.new_group(backend=_COLLECTIVES["cpu"], timeout=timedelta(seconds=limit_s)))


class Broadcasts:
    """A group of its own in which rank 0 sends tensors of `device`'s kind to all others, whatever other groups there are.

    The ranks meet at a store that `open_store` serves; name: of the group, which no other there has had. On the host each rank
    hands on to the next one what it got, so that none sends anything twice; gloo's own broadcasts cost more the smaller they are.
    """

    def __init__(self, device: Device, name: str, rank: int, size: int, meet: Address, limit_s: float) -> None:
        """Raises StalledError where the ranks are not all there within `limit_s`, which later limits every broadcast too."""
        limit = timedelta(seconds=limit_s)
        self._who, self._rank, self._size = f"rank {rank} of {size} in {name!r}", rank, size
        try:
            store = PrefixStore(name, TCPStore(meet.host, meet.port, is_master=False, timeout=limit))
            store.set_timeout(limit)
            make = cast("Any", dist).ProcessGroupNCCL if device.kind == "cuda" else dist.ProcessGroupGloo
            self._group = cast(
                "dist.ProcessGroup", make(store, rank, size, cast("Any", limit))
            )  # the stubs know less than there is
        except (dist.DistError, RuntimeError) as error:
            raise StalledError(f"{self._who} did not meet the others in {limit_s:g} s: {error}") from error
        self._tags = cycle(range(1 << 20))
        self._begin = self._broadcast if device.kind == "cuda" else self._hand_on

    def start(self, tensor: Tensor) -> Callable[[], None]:
        """Begins to send the contiguous `tensor` from rank 0 into that of all others; call what it returns to wait for the end.

        All ranks start the same ones in the same order. Raises StalledError, here or there, where
        another rank does not come in time, or went away.
        """
        if not tensor.numel():
            return lambda: None
        with self._meeting():
            end = self._begin(tensor)

        def wait() -> None:
            with self._meeting():
                end()

        return wait

    def _broadcast(self, tensor: Tensor) -> Callable[[], object]:
        work: dist.Work = cast("Any", self._group).broadcast([tensor], dist.BroadcastOptions())
        return work.wait

    def _hand_on(self, tensor: Tensor) -> Callable[[], object]:
        tag = next(self._tags)
        if self._rank == 0:
            return self._group.send([tensor], 1, tag).wait
        coming = self._group.recv([tensor], self._rank - 1, tag)

        def wait() -> None:
            coming.wait()
            if self._rank + 1 < self._size:
                self._group.send([tensor], self._rank + 1, tag).wait()

        return wait

    @contextmanager
    def _meeting(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StalledError(f"{self._who} waited in a broadcast for a rank that did not come: {error}") from error


@contextmanager
def meeting(what: str) -> Generator[None]:
    """Around collectives: where another rank does not come in time, or not at all, this is a StalledError that names `what`."""
    try:
        yield
    except RuntimeError as error:
        absent = isinstance(error, dist.DistError) or any(sign in str(error) for sign in _ABSENT)
        if isinstance(error, TandemError) or not absent:
            raise
        raise StalledError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} waited in {what} for a rank that did not come: {error}"
        ) from error


def peak_memory_bytes() -> int:
    """The most memory of the machine that this process has held so far; not its children."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def fingerprint() -> dict[str, str]:
    """What the bits of a CPU run depend on besides its recipe: versions, instruction set, threads."""
    return {
        "tandem": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }
