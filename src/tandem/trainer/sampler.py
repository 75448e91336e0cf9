"""Which task comes at which admission, and seeds for the parts of a run: functions of the run's seed and a counter.

Nothing here has state, so a resumed run needs its next ordinal and nothing else.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from tandem.errors import DataError


def seed_of(seed: int, part: str) -> int:
    """A 32-bit seed for one part of a run, independent of the other parts'."""
    return int(np.random.SeedSequence([seed, zlib.crc32(part.encode())]).generate_state(1)[0])


class TaskOrder:
    """position(ordinal) of each admission: epoch after epoch, each a permutation of its own; no repeat within one.

    shuffled: where it is false, each epoch goes through the dataset from the first to the last.
    """

    def __init__(self, size: int, seed: int, name: str = "the dataset", *, shuffled: bool = True) -> None:
        if size < 1:
            raise DataError(f"{name} has no tasks; there is nothing to sample from")
        self._size = size
        self._seed = seed
        self._shuffled = shuffled
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def position(self, ordinal: int) -> int:
        """In [0, size)."""
        epoch, place = divmod(ordinal, self._size)
        if not self._shuffled:
            return place
        if epoch != self._epoch:  # the last one is kept, since ordinals mostly come in order
            self._epoch = epoch
            self._permutation = np.random.Generator(np.random.Philox([self._seed, epoch])).permutation(self._size)
        return int(self._permutation[place])
