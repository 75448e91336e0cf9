"""Any causal language model that transformers knows, as a LanguageModel: for training, where decoder.py lacks the architecture.

The arithmetic is transformers' own, in rows padded on the right, each of which attends to itself alone. A row's bits depend on
its companions, so that log-probabilities agree within a tolerance where those of the decoder are equal, and no rollout engine
runs on this module. What would make log-probabilities or gradients wrong is refused when the model is made: a model that
sees later tokens, and logits that are not the output layer's product with the hidden states. transformers, which this file
imports, takes seconds to load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.durable import attempt
from tandem.errors import EngineError, ModelError
from tandem.models import numerics
from tandem.models.hf import check_finite
from tandem.models.language_model import LanguageModel

_LOUD = 100.0  # logits at which a cap shows


class AutoDecoder(LanguageModel):
    """A transformers model, which keeps its parameters in float32 and has no dropout. dtype: of products, by autocast.

    The children of the transformers model are this module's, so that parameters have their Hugging Face names. Raises ModelError
    for a model that cannot be trained as one.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.config = cast("Any", model.config)
        self._whole = (cast("nn.Module", model.eval().float()),)  # in a tuple it is no child
        for name, child in model.named_children():
            self.add_module(name, child)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        owners = {id(parameter): name for name, parameter in self.named_parameters()}
        if lost := sorted(name for name, parameter in parameters.items() if id(parameter) not in owners):
            raise ModelError(f"{_named(model)} has parameters outside its parts, which cannot be trained here: {', '.join(lost)}")
        self._tied = {name: owners[id(parameter)] for name, parameter in parameters.items() if owners[id(parameter)] != name}
        self._layers = _layers(model)
        for layer in self._layers:
            layer.forward = _Recomputing(self, layer)
        self.requires_grad_()
        if not next(self.parameters()).is_meta:
            self._check()

    @property
    def whole(self) -> nn.Module:
        return self._whole[0]

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self._layers

    @property
    def tied(self) -> dict[str, str]:
        return self._tied

    @property
    def output_weight(self) -> Tensor:
        return cast("Tensor", cast("Any", self.whole).get_output_embeddings().weight).to(self.dtype)

    @classmethod
    def shaped(cls, config: Any, dtype: torch.dtype) -> AutoDecoder:
        return cls(cast("PreTrainedModel", AutoModelForCausalLM.from_config(config)), dtype)

    @property
    def max_positions(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    def prefill(self, tokens: Tensor) -> Tensor:
        if self.max_positions is not None and tokens.shape[1] > self.max_positions:
            raise EngineError(f"a row of {tokens.shape[1]} tokens is longer than the model's {self.max_positions} positions")
        length = tokens.shape[1]
        tokens = F.pad(tokens, (0, max(1 - length, 0)))  # some models cannot read nothing
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            body = cast("Any", self.whole).base_model
            found = body(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
        return cast("Tensor", found.last_hidden_state)[:, :length].to(self.dtype)

    @torch.no_grad()
    def _check(self) -> None:
        """On random tokens. Sums in another order differ by less than the bounds, what is looked for by far more."""
        name, head = _named(self.whole), cast("Any", self.whole).get_output_embeddings()
        if head is None:
            raise ModelError(f"{name} has no output layer that transformers knows of")
        size = int(self.config.vocab_size)
        tokens = torch.randint(size, (2, 8), generator=torch.Generator().manual_seed(0))
        dtype, self.dtype = self.dtype, torch.float32
        hidden = self.prefill(tokens)
        changed = self.prefill(torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % size], 1))
        logits = numerics.linear(hidden.flatten(0, 1), self.output_weight)
        scale = _LOUD / float(logits.abs().max())

        def louder(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (inputs[0] * scale,)

        hook = head.register_forward_pre_hook(louder)
        want = cast("Tensor", cast("Any", self.whole)(input_ids=tokens, use_cache=False).logits).flatten(0, 1)
        hook.remove()
        self.dtype = dtype
        if not _close(changed[:, :-1], hidden[:, :-1], 1e-5):
            raise ModelError(f"{name} lets a token see those after it; a causal language model is needed")
        if getattr(head, "bias", None) is not None or not _close(logits * scale, want, 1e-3):
            raise ModelError(
                f"the logits of {name} are more than its output layer's product with its hidden states (a bias, a cap or a "
                "scale), which is not supported"
            )


def load_auto(path: Path, dtype: torch.dtype = torch.float32) -> AutoDecoder:
    """The model in the Hugging Face directory `path`; nothing is fetched, and no code of the directory runs.

    Raises ModelError for a directory that transformers cannot load, or that lacks weights of its model.
    """
    if not path.is_dir():
        raise ModelError(f"{path} is no directory; a Hugging Face model directory is needed")
    how: dict[str, Any] = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        found = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, **how)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"transformers cannot load {path}: {error}") from error
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", found)
    wrong = {what: info.get(f"{what}_keys") for what in ("missing", "mismatched", "unexpected")}
    if problems := [f"{what} {keys}" for what, keys in wrong.items() if keys]:
        raise ModelError(f"{path} does not hold the tensors that its config describes: {'; '.join(problems)}")
    for name, parameter in model.named_parameters():
        check_finite(parameter, name, path)
    return AutoDecoder(model, dtype)


def save_auto(model: AutoDecoder, path: Path) -> None:
    """Writes the model (float32, an adapter merged) into the directory `path`, as transformers does. Raises SnapshotError."""
    with attempt(f"write the model to {path}", path):
        path.mkdir(parents=True, exist_ok=True)
        cast("PreTrainedModel", model.whole).save_pretrained(path, state_dict=model.weights())


class _Recomputing:
    """A layer's forward, which keeps nothing but its input where the model says so."""

    def __init__(self, model: AutoDecoder, layer: nn.Module) -> None:
        self._model, self._layer = model, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._model.recompute and torch.is_grad_enabled():
            again = cast("Callable[..., Any]", torch.utils.checkpoint.checkpoint)
            return again(self._forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return cast("Any", type(self._layer)).forward(self._layer, *args, **kwargs)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The first list of as many modules as the config says that there are layers."""
    num = getattr(model.config, "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num:
            return list(module)
    raise ModelError(f"{_named(model)} has no list of num_hidden_layers={num} layers")


def _close(a: Tensor, b: Tensor, bound: float) -> bool:
    """Relative to the largest number."""
    return a.shape == b.shape and bool((a - b).abs().max() <= bound * b.abs().max())


def _named(model: nn.Module) -> str:
    return type(model).__name__
