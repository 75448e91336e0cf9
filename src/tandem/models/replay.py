"""Operations on tensors that are written down once and are run again without Python between them.

A decode step on few rows is some two hundred operations of a few microseconds, and Python takes as long again to get from one to
the next. `Replay` calls a function until it is known to be called often, then has torch write down what the function does, and
from then on runs that: the same operations, in the same order, by the same kernels, so the same bits. Nothing is fused, moved or
left out. What a function decides in Python is decided once for each `facts`.

torch calls its recorder deprecated, and has no other that runs operations as they are and needs no compiler. From Python 3.14 on
torch does not stand by it, and functions are called as they are.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

OFTEN = 64  # calls after which writing down has paid for itself when there are as many again
MOST = 12  # records of a function that are kept: one of 24 layers takes 30 to 70 MB
WRITES = sys.version_info < (3, 14)

T = TypeVar("T")
_jit = cast("Any", torch.jit)


class Leaves(Generic[T]):
    """A tree of NamedTuples and lists beside its tensors. shape: equal for trees that differ in nothing but tensors."""

    def __init__(self, tree: T) -> None:
        self.tree = tree
        self.tensors: list[Tensor] = []
        self.shape = repr(self._named(tree))

    def of(self, tensors: Sequence[Tensor]) -> T:
        """The same tree with other tensors."""
        return cast("T", _filled(self.tree, iter(tensors)))

    def _named(self, tree: object) -> object:
        if isinstance(tree, Tensor):
            self.tensors.append(tree)
            return Tensor
        if not isinstance(tree, (tuple, list)):
            return tree
        return type(cast("object", tree)), [self._named(part) for part in cast("Sequence[object]", tree)]


def _filled(tree: object, tensors: Iterator[Tensor]) -> object:
    if isinstance(tree, Tensor):
        return next(tensors)
    if not isinstance(tree, (tuple, list)):
        return tree
    parts = [_filled(part, tensors) for part in cast("Sequence[object]", tree)]
    kind = cast("Any", type(cast("object", tree)))
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


class Replay(Generic[T]):
    """function: of tensors and a tree of tensors to a tensor, without gradient. It reads and writes no other tensor, and what it
    writes does not depend on what stood there: the call that writes it down runs it twice.
    """

    def __init__(self, function: Callable[[Sequence[Tensor], T], Tensor]) -> None:
        self._function = function
        self._calls: Counter[Hashable] = Counter()
        self._written: OrderedDict[Hashable, Callable[..., Tensor]] = OrderedDict()  # the one that ran last stands last

    def __call__(self, facts: Hashable, tensors: Sequence[Tensor], leaves: Leaves[T]) -> Tensor:
        """What the function gives. facts: equal only where it takes the same way through its branches."""
        key = (facts, leaves.shape, len(tensors))
        written = self._written.get(key)
        if written is None:
            self._calls[key] += 1
            if self._calls[key] < OFTEN or not WRITES:
                return self._function(tensors, leaves.tree)
            written = self._written[key] = self._write(tensors, leaves)
            del self._calls[key]
            if len(self._written) > MOST:
                self._written.popitem(last=False)
        self._written.move_to_end(key)
        with _jit.optimized_execution(False):
            return written(*tensors, *leaves.tensors)

    def _write(self, tensors: Sequence[Tensor], leaves: Leaves[T]) -> Callable[..., Tensor]:
        num, of = len(tensors), [leaves.of]

        def function(*given: Tensor) -> Tensor:
            return self._function(given[:num], of[0](given[num:]))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", _jit.TracerWarning)  # of branches: `facts` say which way they go
            written = _jit.trace(function, (*tensors, *leaves.tensors), check_trace=False)
        of.clear()  # torch keeps the function, which would keep these weights
        return written
