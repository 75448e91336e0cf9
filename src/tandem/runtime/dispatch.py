"""How a call on a group becomes one call a rank, and the ranks' results one result. Pure; shared by every runtime.

A batch (DataProto or BatchRef) is cut into whole rows with their keys, or into whole groups where its handle says so,
balanced by tokens; anything else goes to every rank as it is. What comes back is joined by key, so that a caller cannot
see how its batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar, cast

from tandem.data_proto import DataProto
from tandem.errors import ColumnError, RunError
from tandem.ports import Collect, Dispatch
from tandem.types import BatchRef, Key, Metrics

T = TypeVar("T")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def registered(method: Callable[..., Any]) -> tuple[str, Dispatch, Collect]:
    """The method's name and how it is dispatched and collected. Raises RunError where `@register` is missing."""
    name = getattr(method, "__qualname__", repr(method))
    try:
        dispatch, collect = method.__tandem_call__  # type: ignore[attr-defined]
    except AttributeError:
        raise RunError(f"{name} cannot be called through a group: decorate it with @register(dispatch, collect)") from None
    return method.__name__, dispatch, collect


def balanced(lengths: Sequence[int], parts: int, owners: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Row positions of each part, in row order: the longest row first, always to the lightest part.

    owners: whose each row is, where rows of one owner stay together and are dealt as one. Raises ColumnError where there
    are fewer rows, or owners, than parts: a rank without rows would not take part in the step.
    """
    together: dict[Hashable, list[int]] = {}
    for i in range(len(lengths)):
        together.setdefault(i if owners is None else owners[i], []).append(i)
    units = list(together.values())
    if len(units) < parts:
        what = "rows" if owners is None else "groups"
        raise ColumnError(f"{len(units)} {what} cannot be split over {parts} ranks; use a larger batch or fewer ranks")
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    rows: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for i in sorted(range(len(units)), key=lambda i: (-sizes[i], i)):
        lightest = min(range(parts), key=lambda part: (load[part], len(rows[part]), part))
        rows[lightest] += units[i]
        load[lightest] += sizes[i]
    return [sorted(part) for part in rows]


def scatter(args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> list[Call]:
    """The arguments of each rank, every batch among them cut in the same way."""
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto | BatchRef)]
    if not batches:
        raise ColumnError("a call that splits its batch was given no DataProto and no BatchRef")
    if any(batch.keys != batches[0].keys for batch in batches):
        raise ColumnError("a call that splits its batches was given batches with different keys")
    lengths = batches[0].lengths
    whole = any(isinstance(batch, BatchRef) and batch.unit == "group" for batch in batches)
    groups = [key.group for key in batches[0].keys] if whole else None
    positions = balanced(lengths if isinstance(lengths, tuple) else cast("list[int]", lengths.tolist()), size, groups)

    def part(value: Any, rows: list[int]) -> Any:
        return value.select(rows) if isinstance(value, DataProto | BatchRef) else value

    return [
        (tuple(part(value, rows) for value in args), {name: part(value, rows) for name, value in kwargs.items()})
        for rows in positions
    ]


def keys_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Key, ...] | None:
    """The keys of the first batch among the arguments: the order in which joined rows come back."""
    return next((value.keys for value in (*args, *kwargs.values()) if isinstance(value, DataProto | BatchRef)), None)


def gather(results: Sequence[T], collect: Collect, order: tuple[Key, ...] | None) -> T:
    """One result of the ranks': the first, the sum of Metrics, or the rows of all ranks in the order of `order`."""
    first: Any = results[0]
    if collect is Collect.FIRST or len(results) == 1 or all(result is None for result in results):
        return first
    kinds = {type(result) for result in results}
    if collect is Collect.SUM and kinds == {Metrics}:
        return cast("T", sum(cast("Sequence[Metrics]", results), Metrics()))
    if collect is Collect.CONCAT and kinds == {DataProto}:
        joined = DataProto.concat(cast("Sequence[DataProto]", results))
        return cast("T", joined if order is None else joined.by_keys(order))
    if collect is Collect.CONCAT and kinds == {BatchRef}:
        return cast("T", _joined(cast("Sequence[BatchRef]", results), order))
    raise RunError(f"ranks returned {sorted(kind.__name__ for kind in kinds)}, which collect={collect.value} cannot make one")


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
