"""How a call on a group becomes one call a rank, and the ranks' results one result. Pure; shared by every runtime.

A batch (DataProto or BatchRef) is cut into whole rows with their keys, or into whole groups where its handle says so,
balanced by tokens; anything else goes to every rank as it is. Rows are never copied to make a batch even: a part may be
empty, and its rank takes part without rows. What comes back is joined by key, so that a caller cannot see how its batch was
cut.

Ranks that share their rows (tensor or sequence parallel) are neighbours: of `size` ranks, each run of `replicas` gets the
same part, and the first of each run answers for all of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

from tandem.data_proto import DataProto
from tandem.errors import ColumnError, RunError
from tandem.ports import Collect, Dispatch
from tandem.types import BatchRef, Key, Metrics

T = TypeVar("T")
Call = tuple[tuple[Any, ...], dict[str, Any]]

_CONSECUTIVE_SLACK = 1.01  # consecutive rows are views of their columns, scattered ones are copies: worth 1% of imbalance


def registered(method: Callable[..., Any]) -> tuple[str, Dispatch, Collect]:
    """The method's name and how it is dispatched and collected. Raises RunError where `@register` is missing."""
    name = getattr(method, "__qualname__", repr(method))
    try:
        dispatch, collect = method.__tandem_call__  # type: ignore[attr-defined]
    except AttributeError:
        raise RunError(f"{name} cannot be called through a group: decorate it with @register(dispatch, collect)") from None
    return method.__name__, dispatch, collect


def checked(size: int, replicas: int) -> int:
    """`replicas`, where `size` ranks are made of whole runs of it. Raises RunError otherwise."""
    if size < 1:
        raise RunError("a group has at least one worker")
    if replicas < 1 or size % replicas:
        raise RunError(f"{size} ranks are not whole runs of {replicas} that share their rows; use a divisor of {size}")
    return replicas


def balanced(lengths: Sequence[int], parts: int, owners: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Row positions of each part, in row order, with about the same number of tokens; a part may be empty.

    owners: whose each row is, where rows of one owner stay together and are dealt as one. Neighbours stay together where
    their heaviest part is within 1% of the mean. Otherwise the longest goes first, always to the lightest part (LPT: Graham
    1969), and parts differ by no more than the longest.
    """
    if owners is None:
        return [sorted(part) for part in _neighbours(lengths, parts) or _longest_first(lengths, parts)]
    together: dict[Hashable, list[int]] = {}
    for i, owner in enumerate(owners):
        together.setdefault(owner, []).append(i)
    units = list(together.values())
    dealt = balanced([sum(lengths[i] for i in unit) for unit in units], parts)
    return [sorted(i for unit in part for i in units[unit]) for part in dealt]


def _neighbours(sizes: Sequence[int], parts: int) -> list[range] | None:
    """Consecutive parts, cut where the ideal ends are nearest; None where one is too heavy."""
    ends = [0, *accumulate(sizes)]

    def nearest(value: float) -> int:
        after = bisect_left(ends, value)
        return after if after == 0 or ends[after] - value <= value - ends[after - 1] else after - 1

    cuts = [*(nearest(ends[-1] * part / parts) for part in range(parts)), len(sizes)]
    heaviest = max(ends[b] - ends[a] for a, b in pairwise(cuts))
    return [range(a, b) for a, b in pairwise(cuts)] if heaviest * parts <= ends[-1] * _CONSECUTIVE_SLACK else None


def _longest_first(sizes: Sequence[int], parts: int) -> list[list[int]]:
    dealt: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, 0, part) for part in range(parts)]  # tokens, number, part
    for i in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        tokens, number, part = loads[0]
        dealt[part].append(i)
        heapq.heapreplace(loads, (tokens + sizes[i], number + 1, part))
    return dealt


def scatter(dispatch: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, replicas: int) -> list[Call]:
    """The call of each rank that is called. What ranks share is one object, so that a runtime can send it once."""
    match dispatch:
        case Dispatch.RANK_ZERO:
            return [(args, kwargs)]
        case Dispatch.BROADCAST:
            return [(args, kwargs)] * size
        case Dispatch.SPLIT:
            return [call for call in _split(args, kwargs, size // replicas) for _ in range(replicas)]


def _split(args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> list[Call]:
    """The arguments of each part, every batch among them cut in the same way."""
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto | BatchRef)]
    if not batches:
        raise ColumnError("a call that splits its batch was given no DataProto and no BatchRef")
    if any(batch.keys != batches[0].keys for batch in batches):
        raise ColumnError("a call that splits its batches was given batches with different keys")
    if parts == 1:
        return [(args, kwargs)]
    lengths = batches[0].lengths
    whole = any(isinstance(batch, BatchRef) and batch.unit == "group" for batch in batches)
    groups = [key.group for key in batches[0].keys] if whole else None
    positions = balanced(lengths if isinstance(lengths, tuple) else cast("list[int]", lengths.tolist()), parts, groups)

    def part(value: Any, rows: list[int]) -> Any:
        return value.select(rows) if isinstance(value, DataProto | BatchRef) else value

    return [
        (tuple(part(value, rows) for value in args), {name: part(value, rows) for name, value in kwargs.items()})
        for rows in positions
    ]


def gather(results: Sequence[T], dispatch: Dispatch, collect: Collect, replicas: int, call: Call) -> T:
    """One result of the ranks': the first, the sum of Metrics, or the rows of all ranks in the order of the call's batch."""
    results = results[::replicas]
    if collect is Collect.FIRST or len(results) == 1 or all(result is None for result in results):
        return results[0]
    order = _keys_of(call) if dispatch is Dispatch.SPLIT else None
    kinds = {type(result) for result in results}
    if collect is Collect.SUM and kinds == {Metrics}:
        return cast("T", sum(cast("Sequence[Metrics]", results), Metrics()))
    if collect is Collect.CONCAT and kinds == {DataProto}:
        joined = DataProto.concat(cast("Sequence[DataProto]", results))
        return cast("T", joined if order is None else joined.by_keys(order))
    if collect is Collect.CONCAT and kinds == {BatchRef}:
        return cast("T", _joined(cast("Sequence[BatchRef]", results), order))
    raise RunError(f"ranks returned {sorted(kind.__name__ for kind in kinds)}, which collect={collect.value} cannot make one")


def _keys_of(call: Call) -> tuple[Key, ...] | None:
    """The keys of the first batch among the arguments: the order in which joined rows come back."""
    args, kwargs = call
    return next((value.keys for value in (*args, *kwargs.values()) if isinstance(value, DataProto | BatchRef)), None)


def _joined(refs: Sequence[BatchRef], order: tuple[Key, ...] | None) -> BatchRef:
    whole = BatchRef(
        tuple(key for ref in refs for key in ref.keys),
        frozenset[str].intersection(*(ref.columns for ref in refs)),
        tuple(length for ref in refs for length in ref.lengths),
        tuple(policy for ref in refs for policy in ref.policies),
        refs[0].unit,
    )
    if order is None:
        return whole
    position = {key: i for i, key in enumerate(whole.keys)}
    return whole.select([position[key] for key in order])
