"""What a decoder keeps of rows that it has read: keys and values of each layer, and the weights that made them.

It is memory with places in it; decoder.py fills it and attends to it, the engine says which row is where.

Legend: K key-value heads, d head size, W window of keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.models.decoder_config import DecoderConfig
from tandem.models.numerics import KEYS, ROWS, Packed, padded
from tandem.models.projections import LayerWeights
from tandem.models.replay import Leaves


class Weights(NamedTuple):
    """What a forward computes with beside its tokens; a layer that is None asks its own."""

    embedding: Tensor
    layers: Sequence[LayerWeights | None]
    norm: Tensor


class KVCache:
    """Keys and values of `slots` rows of up to `capacity` tokens: position p of a row is column p of its slot.

    keys [layers, slots, K, d, columns], as `numerics.attended` reads them, values [layers, slots, K, columns, d].

    It belongs to the weights that fill it, whose copies in the compute dtype it keeps too: when weights change, go on with what
    `emptied` gives. dtype: float32 is the fastest; the decoder's compute dtype holds the same values, since they are rounded to
    it.
    """

    def __init__(self, config: DecoderConfig, slots: int, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        self.slots, self.capacity = slots, capacity
        layers, places, K, self.columns, d = self._shape(config, slots, capacity)
        self.keys = torch.zeros((layers, places, K, d, self.columns), dtype=dtype)
        self.values = torch.zeros((layers, places, K, self.columns, d), dtype=dtype)
        self._keys, self._values = self.keys.flatten(1).unbind(), self.values.flatten(1, 3).unbind()
        columns = torch.arange(2 * self.columns)
        self._bias = torch.zeros(len(columns)).masked_fill_(columns >= self.columns, float("-inf"))  # a window of it is a row's
        self.weights: Leaves[Weights] | None = None
        self.output: Packed | None = None

    @classmethod
    def num_bytes(cls, config: DecoderConfig, slots: int, capacity: int) -> int:
        """Of its keys and values in float32, before they are there."""
        return 2 * 4 * math.prod(cls._shape(config, slots, capacity))

    @staticmethod
    def _shape(config: DecoderConfig, slots: int, capacity: int) -> tuple[int, int, int, int, int]:
        spare = ROWS  # slots for the rows that a decode step is padded with
        return config.num_layers, slots + spare, config.num_kv_heads, padded(capacity, KEYS), config.head_dim

    def emptied(self) -> KVCache:
        """An empty cache in the same memory, for other weights; this one is not to be used any more."""
        cache = copy(self)
        cache.weights = cache.output = None
        return cache

    def window(self, slots: slice, positions: npt.NDArray[np.int64]) -> list[Tensor]:
        """What rows at `positions` [n], in `slots`, see at most: a bias [n * K, 1, W] that hides the rest, and of each layer keys
        [n * K, d, W] and values [n * K, W, d].
        """
        W, heads = padded(int(positions.max()) + 1, KEYS), self.keys.shape[2]
        begins = torch.from_numpy((self.columns - 1 - positions).repeat(heads))
        keys = self.keys[:, slots, :, :, :W].flatten(1, 2).unbind()
        values = self.values[:, slots, :, :W].flatten(1, 2).unbind()
        return [self._bias.as_strided((self.columns, W), (1, 1)).index_select(0, begins)[:, None], *keys, *values]

    def places(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> list[Tensor]:
        """Where to write what rows at `positions` [n], in `slots` [n], see from now on: which number [n * K, d] of the keys and
        which vector [n * K] of the values of a layer, and these of each layer.
        """
        K, d = self.keys.shape[2:4]
        heads = (slots[:, None] * K + np.arange(K)).ravel()
        position = positions.repeat(K)
        keys = (heads[:, None] * d + np.arange(d)) * self.columns + position[:, None]
        return [torch.from_numpy(keys), torch.from_numpy(heads * self.columns + position), *self._keys, *self._values]

    def fill(self, layer: int, slots: slice | Tensor, k: Tensor, v: Tensor) -> None:
        """Keys and values [n, K, T, d] of a layer, at positions 0 to T - 1 of `slots` [n]."""
        self.keys[layer, slots, ..., : k.shape[2]] = k.transpose(2, 3).to(self.keys.dtype)
        self.values[layer, slots, :, : v.shape[2]] = v.to(self.values.dtype)

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """A key and a value [n, K, d] of a layer at each of `positions` [n] of `slots` [n]."""
        self.keys[layer].permute(0, 3, 1, 2)[slots, positions] = k.to(self.keys.dtype)
        self.values[layer].permute(0, 2, 1, 3)[slots, positions] = v.to(self.values.dtype)

    def read(self, layer: int, slots: Tensor, W: int) -> tuple[Tensor, Tensor]:
        """A layer's keys [n * K, d, W] and values [n * K, W, d], float32, of the first W columns of `slots` [n]."""
        keys, values = self.keys[layer, :, :, :, :W][slots], self.values[layer, :, :, :W][slots]
        return keys.flatten(0, 1).float(), values.flatten(0, 1).float()

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies the first `length` positions of slots `source` [n] int64 to slots `target` [n] int64, as they were before."""
        self.keys[:, target, ..., :length] = self.keys[:, source, ..., :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
