"""One hash for a set of weights, the same wherever it is computed: two holders of equal weights agree on it.

It says that the bits are equal, not that they are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import nn

from tandem.weights import WeightShard


def whole_shards(module: nn.Module) -> Iterator[WeightShard]:
    """The weights of a module that holds all of them."""
    for name, parameter in module.named_parameters():
        yield WeightShard(name, tuple(parameter.shape), (0,) * parameter.ndim, parameter.detach())


def wire_hash(shards: Iterable[WeightShard]) -> str:
    """xxh3 (128 bits, hexadecimal) over name, global shape, offsets, dtype and bits of each shard, in the order given."""
    digest = xxhash.xxh3_128()
    for shard in shards:
        block = shard.tensor.detach().cpu().contiguous()
        header = (shard.name, tuple(shard.shape), tuple(shard.offsets), tuple(block.shape), str(block.dtype))
        digest.update(repr(header).encode())
        digest.update(block.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
