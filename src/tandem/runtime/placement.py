"""Who goes where, before anything starts: what is asked for against what this machine has. Pure.

A pool is a set of processes; roles that name the same pool share its processes, and with them their cores and devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
class Seat:
    """The place of one process: the `rank` of a pool, how many cores it has, and which devices of which kind."""

    pool: str
    rank: int
    cores: int
    kind: Kind
    devices: tuple[int, ...]


def place(pools: Sequence[ResourcePool], there: Hardware) -> tuple[Seat, ...]:
    """A seat for every rank of every pool, in order; no device is given twice.

    Raises DeviceError where there are fewer cores or devices than the pools ask for, with who asks for how much.
    """
    if len({pool.name for pool in pools}) < len(pools):
        raise ValueError(f"pools need names of their own: {', '.join(pool.name for pool in pools)}")
    _check("cores", "cores", {pool.name: (pool.ranks, pool.cores) for pool in pools}, there.cores)
    kind = f"{there.kind} devices" if there.devices else "accelerators"
    _check("devices", kind, {pool.name: (pool.ranks, pool.devices) for pool in pools}, there.devices)
    seats: list[Seat] = []
    used = 0
    for pool in pools:
        for rank in range(pool.ranks):
            seats.append(Seat(pool.name, rank, pool.cores, there.kind, tuple(range(used, used + pool.devices))))
            used += pool.devices
    return tuple(seats)


def _check(key: str, what: str, asked: Mapping[str, tuple[int, int]], there: int) -> None:
    """asked: by pool, how many ranks and how much each."""
    total = sum(ranks * each for ranks, each in asked.values())
    if total > there:
        who = ", ".join(f"{name} {ranks * each} ({ranks} x {each})" for name, (ranks, each) in asked.items() if each)
        raise DeviceError(
            f"{total} {what} are asked for and this machine has {there}: {who}. "
            f"Use fewer ranks, fewer {key} a rank, or let roles share a pool"
        )


def table(seats: Sequence[Seat], roles: Mapping[str, str]) -> str:
    """One line a seat: pool, rank, cores, devices, and the roles of its pool. roles: role -> pool."""
    head = ("pool", "rank", "cores", "devices", "roles")
    rows = [
        (
            seat.pool,
            str(seat.rank),
            str(seat.cores),
            " ".join(f"{seat.kind}:{device}" for device in seat.devices) or "-",
            ", ".join(role for role, pool in roles.items() if pool == seat.pool) or "-",
        )
        for seat in seats
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    )
