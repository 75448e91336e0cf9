"""What samples: an engine in this process that reads the trainer's weights, or several in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.assemble.model import Model
from tandem.assemble.weights import build_checkpoint
from tandem.assemble.workers import Blueprint, Workers
from tandem.checkpoint.publisher import Publisher
from tandem.errors import ConfigError
from tandem.models.decoder import Decoder, KVCache
from tandem.models.language_model import LanguageModel
from tandem.models.probe import TOLERANCE, ProbeResult
from tandem.ports import RolloutEngine
from tandem.recipe import Recipe
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.remote import EngineWorker, RemoteEngine
from tandem.rollout.router import Router
from tandem.runtime.placement import Rank

Engine = NativeEngine | Router
_SERVED = "tandem.assemble.engines:served"


def check_engines(recipe: Recipe) -> None:
    """Raises ConfigError for several engines in one process."""
    if recipe.rollout.engines > 1 and recipe.placement.name == "inline":
        raise ConfigError(
            f"rollout.engines={recipe.rollout.engines} with runtime=inline: engines in one process would take turns on its cores. "
            "Add runtime=process, or leave rollout.engines out"
        )


def build_engine(recipe: Recipe, model: Model) -> Engine:
    """One here, or a router before several, which `publish_to` declares."""
    assert model.probed is not None
    assert isinstance(model.decoder, Decoder), "check_recipe"
    if recipe.rollout.engines == 1:
        return _native(model.decoder, model.renderer.text, recipe.engine, model.probed)
    capabilities = _native(model.decoder, model.renderer.text, recipe.engine, model.probed).capabilities
    vocab_size = model.decoder.config.vocab_size
    return Router(vocab_size=vocab_size, max_context=recipe.engine.max_context, capabilities=capabilities)


def cache_bytes(recipe: Recipe, decoder: Decoder) -> int:
    """Of all engines."""
    return recipe.rollout.engines * KVCache.num_bytes(decoder.config, recipe.engine.slots, recipe.engine.max_context)


def num_alone(recipe: Recipe) -> int:
    """Engines that have a process of their own."""
    return recipe.rollout.engines if recipe.rollout.engines > 1 else 0


def publish_to(
    recipe: Recipe, model: Model, engine: Engine | None, workers: Workers, logs: Path
) -> tuple[tuple[RolloutEngine, ...], Publisher]:
    """The engines that sample, declared where each is in a worker of its own, and what publishes the trainer's weights to them.

    logs: see build_checkpoint.
    """
    if not isinstance(engine, Router):
        return (() if engine is None else (engine,)), build_checkpoint(recipe, model, logs)
    arguments = Blueprint.of(model.decoder), model.tokenizer.decode, recipe.engine, model.probed
    groups = [workers.alone(number, _SERVED, *arguments) for number in range(num_alone(recipe))]
    engines = tuple(
        RemoteEngine(group, vocab_size=engine.vocab_size, max_context=engine.max_context, capabilities=engine.capabilities)
        for group in groups
    )
    checkpoint = build_checkpoint(recipe, model, logs, engine.look)
    engine.serve(engines, checkpoint)
    return engines, checkpoint


def served(
    rank: Rank, blueprint: Blueprint, text: Callable[[Sequence[int]], str], config: NativeConfig, probed: ProbeResult
) -> EngineWorker:
    """The worker of an engine; its weights come with the first publish."""
    del rank
    return EngineWorker(_native(blueprint.build(), text, config, probed))


def _native(
    decoder: LanguageModel, text: Callable[[Sequence[int]], str], config: NativeConfig, probed: ProbeResult
) -> NativeEngine:
    assert isinstance(decoder, Decoder)
    return NativeEngine(decoder, text, config, exact=probed.exact, tolerance=max(TOLERANCE, probed.gap))
