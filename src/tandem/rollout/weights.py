"""New weights into a module that lives here: checked as a whole, then copied in place by Hugging Face name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from tandem.errors import EngineError
from tandem.models.language_model import LanguageModel
from tandem.weights import WeightShard


@torch.no_grad()
def copy_shards(module: nn.Module, shards: Iterable[WeightShard]) -> None:
    """Copies every block into the parameter of its name, casting to the parameter's dtype.

    Nothing is copied unless all names and shapes fit and every parameter is covered; of a model with an adapter, every one of
    the adapter's, since no other changes. Raises EngineError otherwise, naming the weight. Blocks of one weight must not overlap.
    """
    shards = list(shards)
    adapter = module.adapter if isinstance(module, LanguageModel) else None
    parameters = {name: each for name, each in module.named_parameters() if adapter is None or name in adapter.names}
    covered: Counter[str] = Counter()
    for shard in shards:
        parameter = parameters.get(shard.name)
        if parameter is None:
            raise EngineError(f"weight {shard.name!r} is not one of this engine's model; it has {sorted(parameters)}")
        if tuple(parameter.shape) != shard.shape:
            raise EngineError(f"weight {shard.name!r} has shape {list(shard.shape)}, the engine's has {list(parameter.shape)}")
        ends = [offset + size for offset, size in zip(shard.offsets, shard.tensor.shape, strict=True)]
        if min(shard.offsets, default=0) < 0 or any(end > size for end, size in zip(ends, shard.shape, strict=True)):
            raise EngineError(f"a block of weight {shard.name!r} from {list(shard.offsets)} to {ends} leaves {list(shard.shape)}")
        covered[shard.name] += shard.tensor.numel()
    if short := [name for name, parameter in parameters.items() if covered[name] != parameter.numel()]:
        raise EngineError(
            f"{len(short)} weights are not given as a whole, among them {short[0]!r}: {covered[short[0]]} of "
            f"{parameters[short[0]].numel()} numbers; send every weight once"
        )
    for shard in shards:
        block = tuple(slice(offset, offset + size) for offset, size in zip(shard.offsets, shard.tensor.shape, strict=True))
        parameters[shard.name][block].copy_(shard.tensor)
