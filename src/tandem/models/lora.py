"""LoRA through PEFT: it matches targets, puts the adapter's layers into a model and owns the files' format.

On the decoder the arithmetic is ours: PEFT is given a layer for `decoder.Projection` whose products go through numerics, so that
generation and training give a token the same bits with an adapter too. Models of auto.py get PEFT's own layers. This file alone
imports peft, which takes seconds to load.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import peft
import safetensors.torch
import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tandem.errors import ConfigError
from tandem.models import numerics
from tandem.models.adapters import LoraConfig, fingerprint, trained
from tandem.models.decoder import Projection
from tandem.models.language_model import LanguageModel
from tandem.models.numerics import padded
from tandem.models.projections import Linear

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # PEFT's for a model's only adapter; it is a part of parameter names
_PROJECTIONS = (Projection, nn.Linear, Conv1D)
_RANKS = 16  # a rank is padded with zeros to a multiple: the bits of a sum of few or oddly many depend on the row's place
_FILE_PREFIX = "base_model.model."  # of the names in WEIGHTS


def add_lora(model: LanguageModel, config: LoraConfig, seed: int, *, origin: str | None = None) -> None:
    """Freezes the model and puts an adapter into its layers; the model computes the same until that is trained.

    A is uniform from `seed` alone, as PEFT draws it, B is zero. origin: the model's name or directory, for whoever loads the
    adapter. Raises ConfigError for targets that match no projection.
    """
    base = fingerprint(model.named_parameters())
    targets, transposed = _targets(model, config.targets)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=cast("int", config.alpha),  # PEFT computes with any number
        target_modules=targets,
        fan_in_fan_out=transposed,
        task_type=peft.TaskType.CAUSAL_LM,
        base_model_name_or_path=origin,
    )
    settings._register_custom_module({Projection: LoraProjection})  # pyright: ignore[reportPrivateUsage]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model.whole, _NAME)
    settings._custom_modules = None  # pyright: ignore[reportPrivateUsage]
    names = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    model.adapter = LoraAdapter(model, config, seed, settings, names, base)
    trained(model, model.adapter)


class LoraLinear(NamedTuple):
    """A projection and its adapter in the compute dtype: x W^T + bias + scale * (x A^T) B^T, A [R, inputs], B [outputs, R]."""

    base: Linear
    a: Tensor
    b: Tensor
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.base(x) + numerics.linear(numerics.linear(x, self.a), self.b) * self.scale


class LoraProjection(nn.Module, LoraLayer):
    """PEFT's layer around a Projection; it computes nothing itself, since a decoder asks it for what to compute with."""

    base_layer: Projection

    def __init__(self, base_layer: Projection, adapter_name: str, config: peft.LoraConfig, **kwargs: Any) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, kwargs["r"], kwargs["lora_alpha"], config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        outputs, inputs = cast("Projection", module).weight.shape
        return inputs, outputs

    def linear(self, dtype: torch.dtype) -> Linear | LoraLinear:
        base = self.base_layer.linear(dtype)
        if self.disable_adapters:
            return base
        a, b = self._matrices()
        missing = padded(len(a), _RANKS) - len(a)
        a, b = F.pad(a.to(dtype), (0, 0, 0, missing)), F.pad(b.to(dtype), (0, missing))
        return LoraLinear(base, a, b, cast("float", self.scaling[_NAME]))

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What the adapter adds to the weight."""
        a, b = self._matrices()
        return numerics.product(b, a) * cast("float", self.scaling[adapter])

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """A [rank, inputs] and B [outputs, rank]."""
        return cast("Tensor", self.lora_A[_NAME].weight), cast("Tensor", self.lora_B[_NAME].weight)


@dataclass(eq=False)
class LoraAdapter:
    """Implements adapters.Adapter. model: that it is in. settings: PEFT's."""

    model: LanguageModel
    config: LoraConfig
    seed: int
    settings: peft.LoraConfig
    names: frozenset[str]
    base: str

    @property
    def _layers(self) -> Mapping[str, LoraLayer]:
        return {name: layer for name, layer in _modules(self.model).items() if isinstance(layer, LoraLayer)}

    @contextmanager
    def switched_off(self) -> Generator[None]:
        """PEFT's own switch also turns gradients on and off, which a sharded parameter does not follow."""
        layers = self._layers.values()
        for layer in layers:
            layer._disable_adapters = True  # pyright: ignore[reportPrivateUsage]
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False  # pyright: ignore[reportPrivateUsage]

    def frozen(self) -> dict[str, nn.Parameter]:
        parameters = self.model.named_parameters()
        return {_plain(name): parameter for name, parameter in parameters if name not in self.names}

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        found = {name: parameter.detach() for name, parameter in self.frozen().items()}
        for name, layer in self._layers.items():
            weight, delta = found[f"{name}.weight"], cast("Any", layer).get_delta_weight(_NAME)
            found[f"{name}.weight"] = torch.where(delta == 0, weight, weight + delta)  # which keeps the sign of a zero
        return found

    def save(self, directory: Path) -> None:
        found = peft.get_peft_model_state_dict(self.model.whole, adapter_name=_NAME, save_embedding_layers=False)
        try:
            safetensors.torch.save_file(
                {f"{_FILE_PREFIX}{name}": tensor.contiguous() for name, tensor in found.items()},
                directory / WEIGHTS,
                metadata={"format": "pt"},
            )
        except SafetensorError as error:
            raise OSError(str(error)) from error
        (directory / WEIGHTS).chmod(0o644)  # its writer leaves it to the owner alone
        replace(self.settings, inference_mode=True).save_pretrained(str(directory))  # as PEFT writes it


def _targets(model: LanguageModel, wanted: tuple[str, ...]) -> tuple[list[str], bool]:
    """The names that are wanted, each of which some projection of a layer ends with; all of them by default.

    The second result is whether their weights are [inputs, outputs], as GPT-2's are.
    """
    modules = _modules(model)
    inside = {id(module) for layer in model.layers for module in _modules(layer).values() if isinstance(module, _PROJECTIONS)}
    possible = [name for name, module in modules.items() if id(module) in inside]
    outside = [name for name, module in modules.items() if id(module) not in inside]
    short = list(dict.fromkeys(name.rpartition(".")[2] for name in possible))
    for target in wanted:
        if any(_ends(name, target) for name in outside):
            raise ConfigError(f"lora.targets: {target!r} is no projection of a layer; those are {', '.join(short)}")
        if not any(_ends(name, target) for name in possible):
            near = difflib.get_close_matches(target, short, n=3, cutoff=0.4)
            advice = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(short)}"
            raise ConfigError(f"lora.targets: {target!r} matches no projection of the model; {advice}")
    targets = list(wanted) or short
    return targets, any(isinstance(modules[name], Conv1D) for name in possible for target in targets if _ends(name, target))


def _plain(name: str) -> str:
    """A parameter's name without what PEFT puts into it."""
    return name.replace(".base_layer.", ".")


def _modules(model: nn.Module) -> Mapping[str, nn.Module]:
    return dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))


def _ends(name: str, target: str) -> bool:
    """Whether PEFT takes the module of this name for a target."""
    return name == target or name.endswith(f".{target}")
