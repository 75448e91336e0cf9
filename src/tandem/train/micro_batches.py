"""Cutting a batch of ragged rows into passes that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def micro_batches(
    lengths: Mapping[int, int],
    max_tokens: int,
    owners: Sequence[int] | None = None,
    *,
    whole: bool = True,
    padding: bool = True,
) -> list[list[int]]:
    """Rows by pass, shortest first; `lengths` gives each row's tokens.

    With padding, a pass of n rows whose longest has T tokens is one of n T tokens, otherwise of as many as its rows have; that is
    within `max_tokens`. Rows of similar length pass together. A row above the bound passes alone. owners: whose each row
    is, where the rows of one owner pass together, in order; they do so alone where they are above the bound, or, unless whole, row
    by row.
    """

    def size(rows: Sequence[int]) -> int:
        return len(rows) * max(lengths[row] for row in rows) if padding else sum(lengths[row] for row in rows)

    together: dict[int, list[int]] = {}
    for row in lengths:
        together.setdefault(row if owners is None else owners[row], []).append(row)
    units = [
        part for unit in together.values() for part in ([unit] if whole or size(unit) <= max_tokens else [[row] for row in unit])
    ]
    passes: list[list[int]] = []
    total = 0
    for unit in sorted(units, key=lambda unit: max(lengths[row] for row in unit)):
        grown = (len(passes[-1]) + len(unit)) * max(lengths[row] for row in unit) if padding and passes else total + size(unit)
        if passes and grown <= max_tokens:
            passes[-1] += unit
        else:
            passes.append(list(unit))
            grown = size(unit)
        total = grown
    return passes
