"""Who goes where, before anything starts: what is asked for against what this machine has. Pure.

A pool is a set of processes; roles that name the same pool share its processes, and with them their cores and devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tandem.device import Hardware, Kind
from tandem.errors import DeviceError


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """`ranks` processes, each with so many cores (threads of one operation) and accelerators."""

    name: str
    ranks: int
    cores: int = 1
    devices: int = 0

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("cores", 1), ("devices", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} of pool {self.name!r} must be at least {least}, got {getattr(self, name)}")


_LONGEST_S = 365 * 86_400.0
Name = Literal["inline", "process", "ray"]


@dataclass(frozen=True)
class RuntimeConfig:
    """Where the models are that are trained or read beside generation.

    name: inline, in this process; process, in processes of this machine; ray, in actors of a Ray cluster; left out, process where
    pools are named or generation goes on while models are trained, else inline. pools: processes by pool; the role policy, critic,
    reference, ... is in the pool of its name, or else in pool "trainer"; left out, {trainer: 2}, or {trainer: 1} where generation
    goes on meanwhile. cores: threads of one operation of a process. replicas: whole copies of a model among the processes of a
    pool, each copy cut over its share of them. limit_s: how long a call may wait while no process answers, longer than the slowest
    step.
    """

    SHORTHAND: ClassVar[str] = "name"

    name: Name | None = None
    pools: dict[str, int] = field(default_factory=dict[str, int])
    cores: int = 1
    replicas: int = 1
    limit_s: float = 600.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        for pool in self.resource_pools:
            if pool.ranks % self.replicas:
                raise ValueError(f"replicas={self.replicas} does not divide the {pool.ranks} processes of pool {pool.name!r}")
        if not 0 < self.limit_s <= _LONGEST_S:
            raise ValueError(f"limit_s must be above 0 and at most {_LONGEST_S:g} (a year), got {self.limit_s}")

    def settled(self, *, beside_generation: bool) -> SettledRuntime:
        """With name and pools filled in. beside_generation: generation has a process of its own.

        Raises ValueError for what one process has no use for.
        """
        name, pools = self.name or ("process" if self.pools or beside_generation else "inline"), self.pools
        if name != "inline":
            pools = pools or {"trainer": 1 if beside_generation else 2}
        elif pools or self.replicas > 1:
            given = f"runtime.pools={pools}" if pools else f"runtime.replicas={self.replicas}"
            raise ValueError(f"{given}, and with runtime=inline all is in this process: add runtime=process, or leave it out")
        return SettledRuntime(name, pools, self.cores, self.replicas, self.limit_s)

    @property
    def resource_pools(self) -> list[ResourcePool]:
        return [ResourcePool(name, ranks, self.cores) for name, ranks in self.pools.items()]


@dataclass(frozen=True)
class SettledRuntime(RuntimeConfig):
    """One in which nothing is left out: what the recipe says, or what stands for it."""

    name: Name = "inline"


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of a group's workers this is: what a worker's factory is told first.

    index: of `size`. replicas: how many neighbours share their rows; `part` says whose rows these are.
    """

    index: int
    size: int
    replicas: int = 1

    @property
    def part(self) -> int:
        return self.index // self.replicas


@dataclass(frozen=True, slots=True)
class Beside:
    """As an argument of a worker's factory, where workers have processes of their own: the worker of that role, declared before, in
    the same process.
    """

    role: str


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one process: the `rank` of a pool, how many cores it has, and which devices of which kind.

    node: of a cluster; empty for this machine.
    """

    pool: str
    rank: int
    cores: int
    kind: Kind
    devices: tuple[int | str, ...]
    node: str = ""


def place(pools: Sequence[ResourcePool], there: Hardware) -> tuple[Seat, ...]:
    """A seat for every rank of every pool, in order; no device is given twice.

    Raises DeviceError where there are fewer cores or devices than the pools ask for, with who asks for how much.
    """
    check(pools, {"": there})
    return seated(pools, there.kind)


def seated(pools: Sequence[ResourcePool], kind: Kind) -> tuple[Seat, ...]:
    """A seat for every rank of every pool, in order, wherever that is."""
    seats: list[Seat] = []
    used = 0
    for pool in pools:
        for rank in range(pool.ranks):
            seats.append(Seat(pool.name, rank, pool.cores, kind, tuple(range(used, used + pool.devices))))
            used += pool.devices
    return tuple(seats)


def check(pools: Sequence[ResourcePool], there: Mapping[str, Hardware]) -> None:
    """Raises DeviceError where the nodes do not have what the pools ask for: in all, or a single one for a single rank.

    there: what each node has, by its name; this machine has none. All accelerators are of one kind.
    """
    if len({pool.name for pool in pools}) < len(pools):
        raise ValueError(f"pools need names of their own: {', '.join(pool.name for pool in pools)}")
    kind = next((f"{has.kind} devices" for has in there.values() if has.devices), "accelerators")
    cores, devices = ({name: getattr(has, what) for name, has in there.items()} for what in ("cores", "devices"))
    _check("cores", "cores", {pool.name: (pool.ranks, pool.cores) for pool in pools}, cores)
    _check("devices", kind, {pool.name: (pool.ranks, pool.devices) for pool in pools}, devices)


def _check(key: str, what: str, asked: Mapping[str, tuple[int, int]], there: Mapping[str, int]) -> None:
    """asked: by pool, how many ranks and how much each."""
    total, found = sum(ranks * each for ranks, each in asked.values()), sum(there.values())
    who = ", ".join(f"{name} {ranks * each} ({ranks} x {each})" for name, (ranks, each) in asked.items() if each)
    nodes = ", ".join(f"{name} {has}" for name, has in there.items())
    where = "this machine has" if set(there) == {""} else f"the cluster ({nodes}) has"
    if total > found:
        raise DeviceError(
            f"{total} {what} are asked for and {where} {found}: {who}. "
            f"Use fewer ranks, fewer {key} a rank, or let roles share a pool"
        )
    largest = max((each for _, each in asked.values()), default=0)
    if largest > max(there.values(), default=0):
        raise DeviceError(f"{largest} {what} are asked for one rank, and no node of the cluster ({nodes}) has so many: {who}")


def table(seats: Sequence[Seat], roles: Mapping[str, str]) -> str:
    """One line a seat: pool, rank, node of a cluster, cores, devices, and the roles of its pool. roles: role -> pool."""
    columns: dict[str, list[str]] = {
        "pool": [seat.pool for seat in seats],
        "rank": [str(seat.rank) for seat in seats],
        "node": [seat.node for seat in seats],
        "cores": [str(seat.cores) for seat in seats],
        "devices": [" ".join(f"{seat.kind}:{device}" for device in seat.devices) or "-" for seat in seats],
        "roles": [", ".join(role for role, pool in roles.items() if pool == seat.pool) or "-" for seat in seats],
    }
    if not any(columns["node"]):
        del columns["node"]
    padded = [[cell.ljust(max(map(len, cells))) for cell in cells] for cells in ([name, *its] for name, its in columns.items())]
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))
