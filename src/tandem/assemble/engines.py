"""What samples: an engine in this process that reads the trainer's weights, or several in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.assemble.model import Model
from tandem.assemble.weights import build_checkpoint
from tandem.assemble.workers import Blueprint, Workers
from tandem.checkpoint.publisher import Publisher
from tandem.errors import ConfigError
from tandem.models.decoder import Decoder
from tandem.models.kv_cache import KVCache
from tandem.models.language_model import LanguageModel
from tandem.models.probe import TOLERANCE, ProbeResult
from tandem.ports import RolloutEngine, WorkerGroup
from tandem.recipe import Recipe
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.remote import EngineWorker, RemoteEngine
from tandem.rollout.router import Router
from tandem.runtime.placement import Rank
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.workers import ModelWorker

Engine = NativeEngine | Router
_SERVED, _LENT = "tandem.assemble.engines:served", "tandem.assemble.engines:lent"


def check_engines(recipe: Recipe) -> None:
    """Raises ConfigError for several engines in one process, and for trainers that cannot be lent."""
    if recipe.rollout.lend:
        _check_lend(recipe)
    if recipe.rollout.engines > 1 and recipe.placement.name == "inline":
        raise ConfigError(
            f"rollout.engines={recipe.rollout.engines} with runtime=inline: engines in one process would take turns on its cores. "
            "Add runtime=process, or leave rollout.engines out"
        )


def _check_lend(recipe: Recipe) -> None:
    if recipe.trainer.mode != "separate_async":
        raise ConfigError(
            f"rollout.lend in trainer.mode={recipe.trainer.mode}: only in separate_async do trainers wait while engines sample. "
            "Leave rollout.lend out"
        )
    pools = recipe.placement.pools
    ranks = pools.get("policy", pools.get("trainer", 1))
    if ranks > 1:
        raise ConfigError(
            f"rollout.lend with {ranks} processes that hold the policy together: an engine needs all of it in one. Give it one, "
            "runtime.pools={trainer: 1}, or leave rollout.lend out"
        )


def build_engine(recipe: Recipe, model: Model) -> Engine:
    """One here, or a router before those that `publish_to` declares."""
    assert model.probed is not None
    assert isinstance(model.decoder, Decoder), "check_recipe"
    if not num_alone(recipe):
        return _native(model.decoder, model.renderer.text, recipe.engine, model.probed)
    capabilities = _native(model.decoder, model.renderer.text, recipe.engine, model.probed).capabilities
    vocab_size = model.decoder.config.vocab_size
    return Router(vocab_size=vocab_size, max_context=recipe.engine.max_context, capabilities=capabilities)


def cache_bytes(recipe: Recipe, decoder: Decoder) -> int:
    """Of all engines."""
    num = recipe.rollout.engines + recipe.rollout.lend
    return num * KVCache.num_bytes(decoder.config, recipe.engine.slots, recipe.engine.max_context)


def num_alone(recipe: Recipe) -> int:
    """Engines that have a process of their own; where trainers are lent, all: in this one a step would hold up every call."""
    return recipe.rollout.engines if recipe.rollout.engines > 1 or recipe.rollout.lend else 0


def publish_to(
    recipe: Recipe, model: Model, engine: Engine | None, workers: Workers, logs: Path
) -> tuple[tuple[RolloutEngine, ...], Publisher]:
    """The engines that sample, declared where each is in a worker of its own, and what publishes the trainer's weights to them.

    logs: see build_checkpoint.
    """
    if not isinstance(engine, Router):
        return (() if engine is None else (engine,)), build_checkpoint(recipe, model, logs)
    assert model.probed is not None
    how = model.tokenizer.decode, recipe.engine, model.probed
    made = Blueprint.of(model.decoder), *how
    own = [_remote(engine, workers.alone(number, _SERVED, *made)) for number in range(num_alone(recipe))]
    lent = [_remote(engine, workers.beside("policy", "lent", _LENT, *how))] if recipe.rollout.lend else []

    def returned() -> list[RolloutEngine]:
        there = [own[number] for number in workers.returned()]
        for each in there:
            each.begin_again()
        return [*there]

    checkpoint = build_checkpoint(recipe, model, logs, engine.look, lent, returned)
    engine.serve(own, checkpoint, lent)
    return (*own, *lent), checkpoint


def _remote(router: Router, group: WorkerGroup) -> RemoteEngine:
    return RemoteEngine(group, vocab_size=router.vocab_size, max_context=router.max_context, capabilities=router.capabilities)


def served(
    rank: Rank, blueprint: Blueprint, text: Callable[[Sequence[int]], str], config: NativeConfig, probed: ProbeResult
) -> EngineWorker:
    """The worker of an engine; its weights come with the first publish."""
    del rank
    return EngineWorker(_native(blueprint.build(), text, config, probed))


def lent(
    rank: Rank, beside: ModelWorker, text: Callable[[Sequence[int]], str], config: NativeConfig, probed: ProbeResult
) -> EngineWorker:
    """The worker of an engine on the model of another worker."""
    del rank
    assert isinstance(beside.engine, TorchEngine)
    return EngineWorker(_native(beside.engine.decoder, text, config, probed))


def _native(
    decoder: LanguageModel, text: Callable[[Sequence[int]], str], config: NativeConfig, probed: ProbeResult
) -> NativeEngine:
    assert isinstance(decoder, Decoder)
    return NativeEngine(decoder, text, config, exact=probed.exact, tolerance=max(TOLERANCE, probed.gap))
