"""Rows as bytes on a disk: a header, the tensors as they lie in memory, and a checksum of both.

Object columns may hold what a snapshot's may: plain Python values and `PolicyRef`. Nothing but data is made of the bytes. meta_info
is left out, since a queue keeps none.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import xxhash

from tandem.data_proto import DataProto
from tandem.errors import ColumnError, SnapshotError
from tandem.types import Key, PolicyRef

_HEADER = struct.Struct("<QQ")  # xxh3 of what follows, bytes of the pickled part
_NUMPY = {torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def encode(rows: DataProto) -> bytes:
    """Raises ColumnError for an object column that is not plain."""
    shapes = [(name, _dtype(t.dtype), tuple(t.shape), name in rows.token_level) for name, t in rows.batch.items()]
    lengths = cast("list[int]", rows.lengths.tolist())
    try:
        head = pickle.dumps(([tuple(key) for key in rows.keys], lengths, shapes, dict(rows.non_tensor_batch)), protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ColumnError(f"rows {rows.keys[0]}, ... cannot be kept on a disk: {error}") from error
    body = b"".join((head, *map(_bytes, rows.batch.values())))
    return _HEADER.pack(xxhash.xxh3_64_intdigest(body), len(head)) + body


@cache
def _dtype(of: torch.dtype) -> str:
    return str(of).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Its numbers as they lie in memory; such as numpy does not know are viewed as bytes first."""
    if tensor.dtype not in _NUMPY:
        tensor = tensor.contiguous().view(torch.uint8)
    return np.ascontiguousarray(tensor.numpy(force=True)).data


def decode(data: bytes) -> DataProto:
    """Inverse of `encode`. Raises SnapshotError for bytes that are damaged."""
    if len(data) < _HEADER.size or xxhash.xxh3_64_intdigest(body := data[_HEADER.size :]) != _HEADER.unpack_from(data)[0]:
        raise SnapshotError("rows are damaged: their checksum does not hold")
    _, at = _HEADER.unpack_from(data)
    keys, lengths, shapes, objects = _Plain(io.BytesIO(body[:at])).load()
    token: dict[str, torch.Tensor] = {}
    row: dict[str, torch.Tensor] = {}
    for name, kind, shape, of_tokens in shapes:
        dtype = cast("torch.dtype", getattr(torch, kind))
        size = math.prod(shape) * dtype.itemsize
        part = torch.frombuffer(bytearray(body[at : at + size]), dtype=dtype) if size else torch.empty(0, dtype=dtype)
        (token if of_tokens else row)[name] = part.reshape(shape)
        at += size
    return DataProto.make([Key(*key) for key in keys], lengths, token=token, row=row, objects=objects)


class _Plain(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == (PolicyRef.__module__, PolicyRef.__name__):
            return PolicyRef
        raise SnapshotError(f"rows hold a {module_name}.{global_name}, which is no plain value")
