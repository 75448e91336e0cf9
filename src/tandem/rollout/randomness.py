"""Counter-based uniforms: a function of (seed, key, turn, position) and of nothing else.

No generator has a state here, so a token's draw cannot depend on which requests ran beside it, in what order, on
which engine, or whether the request was interrupted. A request's (seed, key, turn) is hashed once to a base of 64
bits; the draw for a position is the splitmix64 output function of base + (position + 1) * GOLDEN (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators", section 4). It is not for secrets.

Legend: M rows.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from tandem.types import Key

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def base(seed: int, key: Key, turn: int) -> int:
    """The 64-bit base of all draws of one turn of one row."""
    return int.from_bytes(blake2b(f"{seed}/{turn}/{key}".encode(), digest_size=8).digest(), "little")


def uniforms(bases: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One draw in [0, 1) a row: float64 [M] for bases uint64 [M] and positions int64 [M] of the tokens to be drawn."""
    z = bases + (positions + 1).astype(np.uint64) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)
