"""What a function of this room may rely on: its tensors are checked once, here, for what the names of its parameters promise.

A suffix names the axes of a tensor: `values_N` has one entry a token, `rewards_B` one a row, `ids_NK` K a token. Axes of
one name have one size. `mask_N` is bool and says which tokens count, `lengths_B` are int64 and add up to N, `groups_B` are
integers. Floats are finite: those of tokens where the mask is true, all others everywhere. What carries a gradient comes
from the model, and whether that is finite is for its engine to judge, with the loss.

Legend: B rows, N packed tokens.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import zip_longest
from typing import Literal, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from tandem.errors import ColumnError, NonFiniteError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NAME = re.compile(r"\w+?_(?P<axes>[A-Z0-9]+|n)")
_WIDE = (torch.float32, torch.float64)
_FIXED = {digit: int(digit) for digit in "123456789"}
"""Axes that are their own size: the 2 of `pairs_P2`."""


def keep(values_N: Tensor, mask_N: Tensor, num_counted: int | None = None) -> Tensor:
    """`values_N` in float32 or better where `mask_N` is true and exactly 0 elsewhere, whatever stands there (NaN too).

    Values may have more axes, [N, ...]. num_counted: how many are true, from a caller that knows; where all are, there is
    nothing to hide.
    """
    if values_N.dtype not in _WIDE:
        values_N = values_N.float()
    if num_counted == len(mask_N):
        return values_N
    return torch.where(mask_N.reshape(-1, *(1,) * (values_N.dim() - 1)), values_N, 0.0)


def num_counted(mask_N: Tensor) -> int:
    """How many tokens count."""
    if not mask_N.is_cpu:
        return int(mask_N.sum())
    mask = mask_N.numpy()  # whose look at bools costs half of torch's, and its count a third
    return len(mask) if mask.all() else int(np.count_nonzero(mask))


def require_finite(
    column: str, values: Tensor, axis: Literal["token", "row"], lengths_B: Tensor | None = None, keys: Sequence[object] = ()
) -> None:
    """Raises NonFiniteError for the first entry of a column that is NaN or infinite, with its place and value.

    axis: what an entry belongs to. lengths_B: tells the row of a token. keys: what the rows are called; else they are counted.
    """
    if math.isfinite(values.sum().item()):
        return
    bad = torch.nonzero(~torch.isfinite(values))
    if not len(bad):  # finite numbers whose sum is too large
        return
    place, value = int(bad[0, 0]), values[tuple(bad[0])].item()
    where = f"{axis} {place}"
    if axis == "token" and lengths_B is not None:
        ends_B = lengths_B.cumsum(0)
        row = int((ends_B <= place).sum())
        where = f"token {place - int(ends_B[row] - lengths_B[row])} of row {keys[row] if keys else row}"
    elif keys:
        where = f"row {keys[place]}"
    raise NonFiniteError(f"column {column!r} is {value} at {where}; it must be finite wherever it counts")


def require_layout(mask_N: Tensor, lengths_B: Tensor | None) -> None:
    """Raises ColumnError unless `mask_N` is bool [N] and `lengths_B`, where given, are whole numbers [B] that add up to N."""
    if mask_N.dtype != torch.bool or mask_N.dim() != 1:
        raise ColumnError(f"column 'mask' must be bool [N], got {mask_N.dtype} {list(mask_N.shape)}")
    if lengths_B is None:
        return
    if lengths_B.dtype.is_floating_point or lengths_B.dim() != 1:
        raise ColumnError(f"lengths must be int64 [B], got {lengths_B.dtype} {list(lengths_B.shape)}")
    if (total := lengths_B.sum().item()) != mask_N.shape[0]:
        raise ColumnError(f"lengths of {len(lengths_B)} rows add up to {total} tokens and column 'mask' has {len(mask_N)}")


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, given only tensors that are what its positional parameters promise; see the module's docstring.

    Beside `mask_N`, a column of tokens reaches it in float32 or better, and as exactly 0 where the mask is false.
    The call raises ColumnError for a tensor of another shape or type, NonFiniteError for a number that is not finite.
    """
    kinds = inspect.signature(function).parameters.values()
    names = [each.name for each in kinds if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    axes = {name: match["axes"] for name in names if (match := _NAME.fullmatch(name))}
    of_rows = [name for name in axes if not axes[name].startswith("N")]
    of_tokens = [name for name in axes if axes[name] == "N" and name != "mask_N"] if "mask_N" in axes else []

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given = (*zip(names, args, strict=False), *kwargs.items())
        tensors = {name: value for name, value in given if name in axes and isinstance(value, Tensor)}
        _require_shapes(tensors, axes)
        for name in of_rows:
            if name in tensors:
                _require_finite(name, tensors[name], "row", None)
        if not of_tokens or "mask_N" not in tensors:
            return function(*args, **kwargs)
        counted = _counted([name for name in of_tokens if name in tensors], tensors)
        placed = (counted.get(name, value) for name, value in zip_longest(names[: len(args)], args, fillvalue=""))
        named = {name: counted.get(name, value) for name, value in kwargs.items()}
        return cast("Callable[..., _R]", function)(*placed, **named)

    return call


def _require_shapes(tensors: Mapping[str, Tensor], axes: Mapping[str, str]) -> None:
    sizes = _FIXED.copy()
    for name, tensor in tensors.items():
        shape, of = tensor.shape, axes[name]
        if len(shape) != len(of):
            raise ColumnError(f"{_said(name)} must be [{', '.join(of)}], got shape {list(shape)}")
        for axis, size in zip(of, shape, strict=True):
            if (want := sizes.setdefault(axis, size)) != size:
                other = next(each for each in tensors if axis in axes[each])
                fits = f" where {want} are needed" if axis in _FIXED else f" and {_said(other)} has {want}"
                raise ColumnError(f"{_said(name)} has {size} entries along {axis}{fits}: they are not of one batch")
        if name.startswith("groups_") and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            raise ColumnError(f"{_said(name)} must hold whole numbers, which tell groups apart, got {tensor.dtype}")
    if "mask_N" in tensors:
        require_layout(tensors["mask_N"], tensors.get("lengths_B"))


def _counted(names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These columns of tokens as they count. Raises NonFiniteError."""
    mask = tensors["mask_N"]
    num = num_counted(mask)
    found = {name: keep(tensors[name], mask, num) for name in names}
    for name, tensor in found.items():
        _require_finite(name, tensor, "token", tensors.get("lengths_B"))
    return found


def _require_finite(parameter: str, tensor: Tensor, axis: Literal["token", "row"], lengths_B: Tensor | None) -> None:
    if tensor.is_floating_point() and not tensor.requires_grad:
        require_finite(_column(parameter), tensor, axis, lengths_B)


def _column(parameter: str) -> str:
    return parameter.rpartition("_")[0]


def _said(parameter: str) -> str:
    return f"column {_column(parameter)!r}"
