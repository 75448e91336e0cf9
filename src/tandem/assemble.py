"""From a recipe to objects: the only file that knows every adapter.

    Recipe -> Model (decoder, tokenizer, renderer)  -> Rollout (engine, agent, rewards)
                                                    -> Phase (source, plan, learner, ...) for the loop

A phase is one run of the loop: an optional warm-up on demonstrations, then the main one. What happens around the loop
(directories, snapshots, evaluation, reports) is launch.py's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.console import Console

from tandem import device
from tandem.agents.env_loop import EnvLoop
from tandem.algos.table import configure
from tandem.checkpoint.in_place import InPlace
from tandem.checkpoint.journal import Journal
from tandem.data.builtin import Demonstrations, Problem, Split, TaskSet
from tandem.data.files import FileDataset
from tandem.data.tasks import TASKS
from tandem.errors import ConfigError, DeviceError, ModelError, PlanError, RegistryError
from tandem.models.decoder import Decoder, DecoderConfig, init_decoder
from tandem.models.hf import load_decoder, save_decoder
from tandem.models.probe import ProbeResult, probe
from tandem.ports import LLM, AgentLoop, Dataset, Env, Tracker
from tandem.queue.memory import MemoryQueue
from tandem.recipe import AgentSection, DatasetSection, Log, ModelSection, Recipe
from tandem.registry import resolve
from tandem.rewards.workers import FunctionReward
from tandem.rollout.native import NativeEngine
from tandem.rollout.session import Session
from tandem.runtime.inline import InlineGroup
from tandem.text.renderer import PLAIN_TEMPLATE, TemplateRenderer
from tandem.text.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from tandem.track.console import ConsoleTracker, Field
from tandem.track.fan_out import Trackers
from tandem.track.jsonl import JsonlTracker
from tandem.track.tensorboard import TensorBoardTracker
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer import stages
from tandem.trainer.dataset import DatasetSource, DatasetSourceConfig
from tandem.trainer.learner import LearnerConfig, PolicyLearner, PolicyWorker
from tandem.trainer.plan import Plan, plan
from tandem.trainer.sampler import seed_of
from tandem.trainer.schedule import schedule
from tandem.trainer.source import MakeLLM, RolloutSource
from tandem.types import Algorithm, Key, PolicyRef, SamplingParams, Task

AGENTS = {"single_turn": "tandem.agents.single_turn:SingleTurn"}
ENVS = {"calculator": "tandem.agents.calculator:CalculatorEnv"}


# ----------------------------------------------------------------------------------------------- model and text


@dataclass(frozen=True)
class Model:
    """What is trained, with its text side; the probe says which law its numbers are under on this machine."""

    decoder: Decoder
    tokenizer: Tokenizer
    renderer: TemplateRenderer
    probed: ProbeResult

    def save(self, directory: Path) -> None:
        """As a Hugging Face directory."""
        save_decoder(self.decoder, directory, self.tokenizer.eos_id)
        self.tokenizer.save(directory)


def build_model(recipe: Recipe) -> Model:
    """Raises ModelError, DeviceError or ConfigError for what cannot be built."""
    here = device.select(recipe.run.device)
    if here.kind != "cpu":
        raise DeviceError(
            f"run.device={recipe.run.device} is not supported by this version, which runs on the CPU; use run.device=cpu"
        )
    device.configure_threads(recipe.run.threads)
    dtype = here.dtype({"float32": "fp32", "bfloat16": "bf16"}[recipe.model.dtype])
    tokenizer = _tokenizer(recipe)
    template = _template(recipe.model.template) if recipe.model.template is not None else None
    if recipe.model.path is not None:
        decoder = load_decoder(recipe.model.path, dtype)
    else:
        decoder = init_decoder(_shape(recipe.model, tokenizer), seed_of(recipe.seed, "weights"), dtype)
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise ModelError(
            f"the tokenizer of {tokenizer.origin} has {tokenizer.vocab_size} tokens and the model {decoder.config.vocab_size}; "
            f"give model.tokenizer the directory of the model's own"
        )
    if recipe.engine.max_context > decoder.config.max_positions:
        raise ConfigError(
            f"engine.max_context={recipe.engine.max_context} is above the {decoder.config.max_positions} positions of the model"
        )
    return Model(decoder, tokenizer, TemplateRenderer(tokenizer, template), probe(decoder.config, dtype))


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"model.template={path} cannot be read: {problem}; give a text file with a chat template") from problem


def _tokenizer(recipe: Recipe) -> Tokenizer:
    directory = recipe.model.tokenizer or recipe.model.path
    if directory is not None:
        return load_tokenizer(directory)
    kinds = [_problem(section.task) for section in _datasets(recipe) if section.task is not None]
    if not kinds:
        raise ConfigError(
            "model.new without model.tokenizer takes one token a character of its built-in task, and data names none; "
            "give model.tokenizer a Hugging Face directory"
        )
    return character_tokenizer("".join(sorted(set("".join(kind.characters for kind in kinds)))), template=PLAIN_TEMPLATE)


def _datasets(recipe: Recipe) -> list[DatasetSection]:
    warmup = recipe.warmup.data if recipe.warmup is not None else None
    return [section for section in (recipe.data.train, recipe.data.heldout, warmup) if section is not None]


def _shape(model: ModelSection, tokenizer: Tokenizer) -> DecoderConfig:
    new = model.new
    assert new is not None
    try:
        return DecoderConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=new.hidden_size,
            intermediate_size=new.intermediate_size,
            num_layers=new.num_layers,
            num_heads=new.num_heads,
            num_kv_heads=new.num_kv_heads,
            head_dim=new.head_dim or new.hidden_size // new.num_heads,
            max_positions=new.max_positions,
            rope_theta=new.rope_theta,
            tie_embeddings=new.tie_embeddings,
            attention_bias=new.attention_bias,
            qk_norm=new.qk_norm,
        )
    except ValueError as problem:
        raise ConfigError(f"model.new: {problem}") from problem


# ----------------------------------------------------------------------------------------- tasks, agents, rewards


def _problem(name: str) -> type[Problem]:
    return cast("type[Problem]", resolve(name, TASKS, kind="task"))


def build_dataset(section: DatasetSection, split: Split, seed: int) -> Dataset:
    """Raises DataError for one that is empty, missing or broken."""
    if section.path is not None:
        return FileDataset(section.path, section.columns)
    assert section.task is not None
    kind = _problem(section.task)
    if section.demonstrations is not None:
        return Demonstrations(kind, split, seed=seed, size=section.size, noise=section.demonstrations)
    return TaskSet(kind, split, seed=seed, size=section.size)


def build_agent(section: AgentSection) -> AgentLoop:
    if section.env is not None:
        make_env = cast("Callable[[Task], Env]", resolve(section.env, ENVS, kind="environment"))
        return EnvLoop(make_env, section.max_turns)
    make_agent = cast("Callable[[], AgentLoop]", resolve(section.name, AGENTS, kind="agent"))
    if not callable(make_agent):
        raise RegistryError(f"agent {section.name!r} is {make_agent!r}; name a class or function that makes an AgentLoop")
    return make_agent()


@dataclass(frozen=True)
class Rollout:
    """The generating side, shared by training and evaluation, with a reward for each.

    A judgement of training that depended on a clock is journalled, so that a resumed run repeats it.
    """

    engine: NativeEngine
    agent: AgentLoop
    make_llm: MakeLLM
    reward: FunctionReward
    eval_reward: FunctionReward


@asynccontextmanager
async def open_rollout(recipe: Recipe, model: Model, journal: Journal | None = None) -> AsyncGenerator[Rollout]:
    """Starts what generates and judges, and ends all of it. Raises RewardError for a reward that cannot be loaded."""
    if recipe.reward is None:
        raise ConfigError(f"algorithm {recipe.algorithm.name} needs a reward: name one, e.g. reward.function=exact_match")
    engine = NativeEngine(model.decoder, model.renderer.text, recipe.engine, exact=model.probed.exact)
    reward, eval_reward = FunctionReward(recipe.reward, journal=journal), FunctionReward(recipe.reward)

    def make_llm(key: Key, seed: int, params: SamplingParams) -> LLM:
        return Session(engine, model.renderer, key, params, seed=seed, max_context=recipe.engine.max_context)

    try:
        await reward.start()
        yield Rollout(engine, build_agent(recipe.agent), make_llm, reward, eval_reward)
    finally:
        await engine.close()
        await reward.close()
        await eval_reward.close()


# ------------------------------------------------------------------------------------------------------- phases


@dataclass(frozen=True)
class Phase:
    """One run of the loop with what it works on. The policy's versions count its steps."""

    name: str
    steps: int
    algorithm: Algorithm
    source: RolloutSource | DatasetSource
    plan: Plan
    learner: PolicyLearner
    train: TorchEngine
    queue: MemoryQueue
    checkpoint: InPlace
    engines: tuple[NativeEngine, ...]

    async def connect(self) -> None:
        await self.checkpoint.connect(self.train, self.engines)


def supervised(recipe: Recipe) -> bool:
    """Whether the main phase learns from demonstrations and not from rewards."""
    return algorithm(recipe).advantage is None


def algorithm(recipe: Recipe) -> Algorithm:
    """Raises ConfigError for parameters that do not fit."""
    return configure(recipe.algorithm.name, recipe.algorithm.params)


def warmup_phase(recipe: Recipe, model: Model) -> Phase:
    warmup = recipe.warmup
    assert warmup is not None
    return _supervised_phase(
        recipe, model, "warmup", warmup.data, configure("sft"), warmup.steps, warmup.rows_per_step, warmup.train, LearnerConfig()
    )


def main_phase(recipe: Recipe, model: Model, rollout: Rollout | None) -> Phase:
    """rollout: None for a supervised one. Raises ConfigError for a batch that could never be trained on."""
    _check_batch(recipe, algorithm(recipe))
    if rollout is None:
        return _supervised_phase(
            recipe,
            model,
            "train",
            recipe.data.train,
            algorithm(recipe),
            recipe.trainer.steps,
            recipe.rollout.groups_per_step * recipe.rollout.group_size,
            recipe.train,
            recipe.learner,
        )
    queue, chosen = MemoryQueue(recipe.queue), algorithm(recipe)
    engine = TorchEngine(model.decoder, recipe.train.over(_updates(recipe.trainer.steps, recipe.learner)))
    workers = InlineGroup((PolicyWorker(engine, queue, chosen),))
    source = RolloutSource(
        dataset=build_dataset(recipe.data.train, "train", seed_of(recipe.seed, "tasks")),
        agent=rollout.agent,
        reward=rollout.reward,
        make_llm=rollout.make_llm,
        params=recipe.sampling,
        queue=queue,
        engines=(rollout.engine,),
        algorithm=chosen,
        schedule=schedule(recipe.trainer.mode, recipe.trainer.staleness),
        config=recipe.rollout,
        seed=recipe.seed,
        policy=PolicyRef(),
    )
    old_logprobs = stages.bypass(queue) if chosen.params.get("bypass") else stages.old_logprobs(workers)
    known = (stages.advantages(chosen, queue), old_logprobs, *stages.derived(chosen, queue, seed=seed_of(recipe.seed, "derived")))
    try:
        planned = plan(chosen.needs, source.columns, known)
    except PlanError as problem:
        raise ConfigError(f"algorithm {chosen.name} cannot be trained with yet: {problem}") from problem
    return Phase(
        name="train",
        steps=recipe.trainer.steps,
        algorithm=chosen,
        source=source,
        plan=planned,
        learner=PolicyLearner(workers, recipe.learner, seed=recipe.seed),
        train=engine,
        queue=queue,
        checkpoint=InPlace(),
        engines=(rollout.engine,),
    )


def _check_batch(recipe: Recipe, chosen: Algorithm) -> None:
    groups, size = recipe.rollout.groups_per_step, recipe.rollout.group_size
    if chosen.advantage is None:
        groups, size = groups * size, 1
    if size < chosen.min_episodes:
        raise ConfigError(f"rollout.group_size={size} is below the {chosen.min_episodes} episodes that {chosen.name} compares")
    if groups < recipe.learner.minibatches:
        raise ConfigError(
            f"learner.minibatches={recipe.learner.minibatches} is above the {groups} groups of a step, which are not split; "
            f"lower it or raise rollout.groups_per_step"
        )


def _updates(steps: int, learner: LearnerConfig) -> int:
    return steps * learner.epochs * learner.minibatches


def _supervised_phase(
    recipe: Recipe,
    model: Model,
    name: str,
    data: DatasetSection,
    chosen: Algorithm,
    steps: int,
    rows_per_step: int,
    config: TrainConfig,
    learner: LearnerConfig,
) -> Phase:
    queue, engine = MemoryQueue(recipe.queue), TorchEngine(model.decoder, config.over(_updates(steps, learner)))
    source = DatasetSource(
        dataset=build_dataset(data, "train", seed_of(recipe.seed, "demonstrations")),
        renderer=model.renderer,
        queue=queue,
        config=DatasetSourceConfig(rows_per_step=rows_per_step, max_context=recipe.engine.max_context),
        seed=recipe.seed,
        policy=PolicyRef(),
    )
    workers = InlineGroup((PolicyWorker(engine, queue, chosen),))
    return Phase(
        name=name,
        steps=steps,
        algorithm=chosen,
        source=source,
        plan=plan(chosen.needs, source.columns, ()),
        learner=PolicyLearner(workers, learner, seed=recipe.seed),
        train=engine,
        queue=queue,
        checkpoint=InPlace(),
        engines=(),
    )


# ------------------------------------------------------------------------------------------------------ trackers


def build_trackers(recipe: Recipe, phase: Phase, directory: Path, console: Console) -> Trackers:
    """The trackers of `recipe.logs`; a phase has a directory of its own."""
    title = phase.algorithm.name.upper() if phase.name == "train" else phase.name
    fields = (
        Field("train/loss", "loss {:.3f}"),
        Field("reward/mean", "reward {:.2f}"),
        Field("eval/pass@1", "held-out {:.2f}"),
        Field("rollout/dropped_reward_failed", "failed rewards {:.0f}"),
        Field("time/tokens_per_s", "{:,.0f} tokens/s"),
    )
    made: dict[Log, Callable[[], Tracker]] = {
        "console": lambda: ConsoleTracker(title, phase.steps, fields, console=console),
        "tensorboard": lambda: TensorBoardTracker(directory / "tensorboard"),
    }
    return Trackers({"jsonl": JsonlTracker(directory / "metrics.jsonl"), **{name: made[name]() for name in recipe.logs}})
