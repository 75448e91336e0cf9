"""What a layer of the decoder computes with: its projections, each by itself or those of one input as one product.

It holds no parameters: decoder.py makes these of them, and lora.py puts an adapter in. All products are those of numerics.py.

Legend: M rows of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.models import numerics


class Linear(NamedTuple):
    """A projection in the compute dtype."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return numerics.linear(x, self.weight, self.bias)

    def packed(self) -> PackedLinear:
        return PackedLinear(numerics.packed(self.weight), None if self.bias is None else self.bias.detach())


class PackedLinear(NamedTuple):
    """The same for use again and again, without gradient."""

    weight: numerics.Packed
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return numerics.linear(x, self.weight, self.bias)


Product = Callable[[Tensor], Tensor]  # [M, inputs] -> [M, outputs]: a Linear, or one with an adapter


class Apart(NamedTuple):
    """Groups of projections of one input, each computed by itself; a group's outputs stand side by side."""

    groups: tuple[tuple[Product, ...], ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(group[0](x) if len(group) == 1 else torch.cat([each(x) for each in group], 1) for group in self.groups)

    def joined(self) -> Apart | Joined:
        """One product of the same bits, unless an adapter stands in one."""
        flat = [each for group in self.groups for each in group]
        linear = [each for each in flat if isinstance(each, Linear)]
        if len(linear) < len(flat):
            return self
        biases = [each.bias for each in linear if each.bias is not None]
        product = Linear(torch.cat([each.weight for each in linear]), torch.cat(biases) if biases else None).packed()
        sizes = iter(len(each.weight) for each in linear)
        return Joined(product, [sum(next(sizes) for _ in group) for group in self.groups])


class Joined(NamedTuple):
    """The same as one projection; sizes: of the groups' outputs."""

    product: PackedLinear
    sizes: list[int]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.product(x).split_with_sizes(self.sizes, 1)

    def joined(self) -> Joined:
        return self


class LayerWeights(NamedTuple):
    """One layer: projections in the compute dtype; norms in float32, rounded to it. qk_norm: [H + K, d], a norm a head."""

    attention_norm: Tensor
    qk_v: Apart | Joined
    o: Product
    qk_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Apart | Joined
    down: Product

    def joined(self) -> LayerWeights:
        """For use again and again, without gradient: what reads the same input is one product, and weights are packed."""
        o, down = (each.packed() if isinstance(each, Linear) else each for each in (self.o, self.down))
        return self._replace(qk_v=self.qk_v.joined(), o=o, gate_up=self.gate_up.joined(), down=down)
