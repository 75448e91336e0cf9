"""Where the rows of a decode step are cut into two parts, so that short rows do not read the window of long ones.

It knows positions only; decoder.py attends, and the engine moves long rows before short ones where that pays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PART = 16  # rows that attend together at least
SPARED = 512  # keys of a layer that are worth the operations of a second attention


def spread(positions: npt.NDArray[np.int64]) -> int:
    """Keys that rows at `positions` [n] see in vain in the window of the longest."""
    return len(positions) * int(positions.max()) - int(positions.sum())


def window_cut(positions: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Where it spares most to cut rows at `positions` [n] into two parts, each with the window of its longest row; the keys spared.

    At a multiple of PART; (0, 0) where nothing worth the operations of a second part is spared.
    """
    num = len(positions)
    if spread(positions) <= SPARED:
        return 0, 0
    cuts = np.arange(0, num, PART)
    longest = np.maximum.reduceat(positions, cuts)
    before, after = np.maximum.accumulate(longest)[:-1], np.maximum.accumulate(longest[::-1])[::-1]
    spared = cuts[1:] * (after[0] - before) + (num - cuts[1:]) * (after[0] - after[1:])
    best = int(spared.argmax()) if len(spared) else -1
    return (int(cuts[best + 1]), int(spared[best])) if best >= 0 and spared[best] > SPARED else (0, 0)
