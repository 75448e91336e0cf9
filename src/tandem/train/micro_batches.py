"""Cutting a batch of ragged rows into passes that fit."""

from __future__ import annotations

from collections.abc import Mapping


def micro_batches(lengths: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """Rows by pass, shortest first; `lengths` gives each row's tokens.

    A pass of n rows whose longest has T tokens is padded to n T tokens, which is within `max_tokens`. Rows of similar
    length pass together, so that little is padding. A row above the bound passes alone.
    """
    passes: list[list[int]] = []
    for row in sorted(lengths, key=lambda row: lengths[row]):
        if passes and (len(passes[-1]) + 1) * lengths[row] <= max_tokens:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes
