"""Datasets made of other datasets: some of one's tasks, or those of several in given shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.errors import DataError
from tandem.ports import Dataset
from tandem.types import Task


class Kept:
    """The tasks of a dataset that `keep` accepts, in their order or by `order`. Implements the Dataset port.

    notes: how many were left out, in words, here and in a dataset of this kind below it. why: what is wrong with them, as in
    "12 of 100 tasks have WHY". Raises DataError where none is left.
    """

    def __init__(
        self, dataset: Dataset, keep: Callable[[Task], bool], why: str, order: Callable[[Task], float] | None = None
    ) -> None:
        self.name = dataset.name
        self._dataset = dataset
        self._positions = [i for i in range(len(dataset)) if keep(dataset[i])]
        if order is not None:
            self._positions.sort(key=lambda i: order(dataset[i]))
        if not self._positions:
            raise DataError(f"all {len(dataset)} tasks of {self.name} have {why}, and none is left: loosen the filter")
        out = len(dataset) - len(self._positions)
        note = (f"{out} of {len(dataset)} tasks of {self.name} have {why} and are left out",) if out else ()
        self.notes: tuple[str, ...] = (*(dataset.notes if isinstance(dataset, Kept) else ()), *note)

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> Task:
        return self._dataset[self._positions[index]]


LONGEST_PASS = 1 << 26  # tasks, of which a permutation is made


class Mixture:
    """Several datasets as one, of which each gives its share of the tasks. Implements the Dataset port.

    weights: shares up to a factor, each above 0. One pass holds every task of every dataset at least once, and is as short as it
    can be then: the dataset that is largest for its share is in it once, and the others come again. Weights that are the sizes
    make it the datasets one after the other. A task's id begins with the number of its dataset, and a repeated one's ends
    with that of the repeat. Raises DataError for weights that make a pass too long.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]) -> None:
        assert len(datasets) == len(weights) > 0
        self.name = "+".join(dataset.name for dataset in datasets)
        self._datasets = tuple(datasets)
        passes = max(len(dataset) / weight for dataset, weight in zip(datasets, weights, strict=True))
        if passes * sum(weights) > LONGEST_PASS:
            sizes = [len(dataset) for dataset in datasets]
            raise DataError(
                f"the weights {list(weights)} of sources of {sizes} tasks make one pass over all of them "
                f"{passes * sum(weights):.3g} tasks long, above {LONGEST_PASS:,}: bring the weights closer together"
            )
        self.counts = tuple(
            max(len(dataset), math.floor(weight * passes + 0.5)) for dataset, weight in zip(datasets, weights, strict=True)
        )

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, index: int) -> Task:
        place = range(len(self))[index]
        for number, (dataset, count) in enumerate(zip(self._datasets, self.counts, strict=True)):
            if place < count:
                again, position = divmod(place, len(dataset))
                task = dataset[position]
                return replace(task, id=f"{number}/{task.id}" + (f"/{again}" if again else ""))
            place -= count
        raise AssertionError
