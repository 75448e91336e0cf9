"""New weights into a module that lives here: checked before anything is copied, then copied or scattered in place by name.

`scatter` also serves an engine that cuts its weights otherwise than the trainer: each of its blocks takes what falls into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tandem.errors import EngineError
from tandem.models.language_model import LanguageModel
from tandem.ports import WeightSource
from tandem.weights import Room, WeightBlock, WeightPatch, WeightPiece, WeightShard, block_hash, joined_hash, two_at_a_time


@torch.no_grad()
def load(module: nn.Module, source: WeightSource) -> None:
    """Copies every piece into the parameter of its name, casting to the parameter's dtype.

    Nothing is copied unless all names and shapes fit and every parameter is covered; of a model with an adapter, every one of
    the adapter's, since no other changes. Raises EngineError otherwise, naming the weight. Blocks of one weight must not overlap.
    """
    parameters = _moving(module)
    _check(parameters, source.blocks)
    for piece in source.shards(room(parameters)):
        scatter(piece, parameters[piece.block.name])


def room(weights: Mapping[str, Tensor]) -> Room:
    """Where whole weights have the numbers of a block side by side, in its dtype."""

    def there(block: WeightBlock) -> Tensor | None:
        found = weights[block.name][block.slices]
        return found if found.dtype == block.dtype and found.is_contiguous() else None

    return there


def scatter(piece: WeightPiece, into: Tensor, offsets: Sequence[int] | None = None) -> None:
    """Writes what of the piece falls into `into`, which is the weight, or its block at `offsets`.

    Of a patch, `into` holds what the sender had before, in a dtype that loses nothing of it.
    """
    block = piece.block
    mine = WeightBlock(block.name, block.shape, tuple(offsets or (0,) * into.ndim), tuple(into.shape), into.dtype)
    starts = [max(a, b) for a, b in zip(block.offsets, mine.offsets, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(block.offsets, block.size, mine.offsets, mine.size, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return
    if isinstance(piece, WeightShard):
        into[_part(starts, ends, mine)].copy_(piece.tensor[_part(starts, ends, block)])
        return
    if block == mine and into.is_contiguous():
        _overwrite(into, piece)
        return
    whole, there = torch.empty(block.size, dtype=block.dtype, device=into.device), into[_part(starts, ends, mine)]
    here = whole[_part(starts, ends, block)]
    here.copy_(there)
    _overwrite(whole, piece)
    there.copy_(here)


def _overwrite(block: Tensor, patch: WeightPatch) -> None:
    planes = block.view(-1).view(torch.uint8).view(-1, block.itemsize).unbind(1)
    for plane, (numbers, values) in zip(planes, patch.planes(), strict=True):
        plane.scatter_(0, numbers.to(block.device), values.to(block.device))


def wire_hash(weights: Mapping[str, Tensor], blocks: Sequence[WeightBlock]) -> str:
    """Of these blocks of whole weights. Raises EngineError for one that is not among them."""

    def each(number: int) -> bytes:
        block = blocks[number]
        _fit(weights, block)
        weight = weights[block.name].detach()
        return block_hash(block, weight if block.size == block.shape else weight[block.slices])

    return joined_hash(two_at_a_time(each, len(blocks)))


def _moving(module: nn.Module) -> Mapping[str, Tensor]:
    adapter = module.adapter if isinstance(module, LanguageModel) else None
    return {name: each.detach() for name, each in module.named_parameters() if adapter is None or name in adapter.names}


def _check(parameters: Mapping[str, Tensor], blocks: Sequence[WeightBlock]) -> None:
    covered: Counter[str] = Counter()
    for block in blocks:
        _fit(parameters, block)
        covered[block.name] += block.numel
    if short := [name for name, parameter in parameters.items() if covered[name] != parameter.numel()]:
        raise EngineError(
            f"{len(short)} weights are not given as a whole, among them {short[0]!r}: {covered[short[0]]} of "
            f"{parameters[short[0]].numel()} numbers; send every weight once"
        )


def _fit(parameters: Mapping[str, Tensor], block: WeightBlock) -> None:
    parameter = parameters.get(block.name)
    if parameter is None:
        raise EngineError(f"weight {block.name!r} is not one of this engine's model; it has {sorted(parameters)}")
    if tuple(parameter.shape) != block.shape:
        raise EngineError(f"weight {block.name!r} has shape {list(block.shape)}, the engine's has {list(parameter.shape)}")
    ends = [offset + size for offset, size in zip(block.offsets, block.size, strict=True)]
    if min(block.offsets, default=0) < 0 or any(end > size for end, size in zip(ends, block.shape, strict=True)):
        raise EngineError(f"a block of weight {block.name!r} from {list(block.offsets)} to {ends} leaves {list(block.shape)}")


def _part(starts: Sequence[int], ends: Sequence[int], of: WeightBlock) -> tuple[slice, ...]:
    return tuple(slice(start - offset, end - offset) for start, end, offset in zip(starts, ends, of.offsets, strict=True))
