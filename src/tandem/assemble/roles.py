"""The models beside the policy: which of them an algorithm needs, what each gives, and where its weights come from.

A role is there if a column that it gives is read, and not otherwise. Its model is that of its own directory, or a copy of
the policy as it is when the main phase begins, which `runs/NAME/initial` holds, so that a resumed run has the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from tandem.algos.columns import AGGREGATION, reads, unit_of
from tandem.algos.table import configure
from tandem.assemble.model import Model, check_fit
from tandem.assemble.workers import Blueprint, Job, Workers
from tandem.errors import ConfigError, ModelError
from tandem.models.decoder import Decoder
from tandem.models.hf import check_values, has_value_head, read_config
from tandem.models.language_model import LanguageModel
from tandem.models.values import ValueModel
from tandem.ports import WorkerGroup
from tandem.recipe import (
    CriticSection,
    ProcessModelSection,
    Recipe,
    ReferenceSection,
    RewardModelSection,
    TeacherSection,
    TrainedSection,
)
from tandem.text.tokenizer import load_tokenizer
from tandem.train.config import TrainConfig
from tandem.trainer import stages
from tandem.trainer.learner import Trained
from tandem.trainer.plan import BatchStage
from tandem.trainer.workers import ModelWorker, TrainWorker
from tandem.types import Algorithm


@dataclass(frozen=True)
class Kind:
    """What a role is for. outputs: its columns, and the output of its engine that each is. objective: the row that it is
    trained for; None: it is frozen. model: what holds its weights. judges: it gives its column as a reward, of episodes as they
    end, and is there if its section is.
    """

    outputs: Mapping[str, str]
    objective: str | None = None
    model: type[Decoder] = Decoder
    judges: bool = False


KINDS: Mapping[str, Kind] = {
    "critic": Kind({"values": "values"}, CriticSection.OBJECTIVE, ValueModel),
    "process_model": Kind({"prm_logprobs": "logprobs"}, ProcessModelSection.OBJECTIVE),
    "reference": Kind({"ref_logprobs": "logprobs"}),
    "teacher": Kind({"teacher_logprobs": "logprobs", "teacher_topk_ids": "top_ids", "teacher_topk_logprobs": "top_logprobs"}),
    "reward_model": Kind({"rewards": "values"}, model=ValueModel, judges=True),
}
"""By the name of their section in a recipe; those that are trained come first, since what they learn from may need another."""


@dataclass(frozen=True)
class Role:
    """A model beside the policy.

    path: where its weights come from; None: from the policy as the phase begins. objective: what it is trained for, if it
    is. outputs: the columns that are read. warmup_steps: steps in which the policy is not trained yet. top: how many of
    its likeliest tokens are read. reset_every: steps after which it becomes the policy as it is then; 0 is never.
    """

    name: str
    model: Blueprint
    path: Path | None
    workers: WorkerGroup
    outputs: Mapping[str, str]
    objective: Algorithm | None = None
    warmup_steps: int = 0
    top: int = 0
    reset_every: int = 0

    def describe(self) -> str:
        origin = "the policy as it begins" if self.path is None else str(self.path)
        use = f"trained by {self.objective.name}" if self.objective is not None else "frozen"
        return f"{self.name:<14} {use}, gives {', '.join(self.outputs)}; from {origin}"

    @property
    def stage(self) -> BatchStage:
        weights = "current" if self.objective or self.reset_every else "frozen"  # a reset must not come after its stage
        return stages.model_outputs(self.name, self.workers, self.outputs, weights, top=self.top)


@dataclass(frozen=True)
class Roles:
    """The models beside the policy in one phase."""

    all: tuple[Role, ...]

    @property
    def stages(self) -> list[BatchStage]:
        return [role.stage for role in self.all if not KINDS[role.name].judges]

    @property
    def judge(self) -> Role | None:
        """The one whose scores are the rewards."""
        return next((role for role in self.all if KINDS[role.name].judges), None)

    @property
    def needs(self) -> frozenset[str]:
        """Columns that their updates read."""
        return frozenset[str]().union(*(role.objective.needs for role in self.all if role.objective))

    @property
    def saved(self) -> tuple[Role, ...]:
        """Those whose weights change in the phase, and are a part of each snapshot."""
        return tuple(role for role in self.all if role.objective is not None or role.reset_every)

    def trained(self, policy: WorkerGroup) -> dict[str, WorkerGroup]:
        """The workers that are trained in the phase, by role."""
        return {"policy": policy, **{role.name: role.workers for role in self.all if role.objective}}

    @property
    def copies(self) -> tuple[Role, ...]:
        """Those whose model is the policy's as the phase begins."""
        return tuple(role for role in self.all if role.path is None)

    async def begin(self, initial: Path) -> None:
        """Gives each its weights; the copies, from the directory of the policy as it was when the phase began."""
        for role in self.all:
            await role.workers.call(ModelWorker.load_weights, initial if role.path is None else role.path.resolve())

    def due(self, step: int) -> tuple[Role, ...]:
        """Those that become the policy as it is after this step.

        ProRL (arXiv 2505.24864): so that a run that is long is not held back to where it began.
        """
        return tuple(role for role in self.all if role.reset_every and step % role.reset_every == 0)

    async def reset(self, policy: WorkerGroup, step: int, weights: Path) -> None:
        """Those whose time it is become the policy as it is, from its directory, and its optimiser begins anew."""
        for role in self.due(step):
            await role.workers.call(ModelWorker.load_weights, weights)
        await policy.call(TrainWorker.reset_optimizer)

    @property
    def warmup_steps(self) -> int:
        """Steps in which the policy is not trained yet."""
        return max((role.warmup_steps for role in self.all), default=0)

    def learners(self, policy: WorkerGroup, algorithm: Algorithm) -> tuple[Trained, ...]:
        """What a mini-batch trains, in order: the other models, then the policy."""
        others = [Trained(role.workers, unit_of(role.objective)) for role in self.all if role.objective]
        return (*others, Trained(policy, unit_of(algorithm), from_version=self.warmup_steps))


def check_roles(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raises ConfigError for a role that is set and that the main phase has no use for."""
    used = {name for name, _, _ in _used(recipe, algorithm)}
    for name, kind in KINDS.items():
        if _section(recipe, name) is not None and name not in used:
            columns = " or ".join(kind.outputs)
            raise ConfigError(f"{name} is set, and {algorithm.name} with its parameters reads no {columns}: leave it out")


def build_roles(recipe: Recipe, model: Model, algorithm: Algorithm, workers: Workers, updates: int) -> Roles:
    """The roles whose columns the algorithm reads. updates: of the phase, for the schedules of their learning rates.

    Raises ConfigError or ModelError for a role without a model, or with one that does not fit.
    """
    roles: list[Role] = []
    for name, outputs, objective in _used(recipe, algorithm):
        if name == "reference" and _is_base(recipe):
            continue
        section, path = _section(recipe, name), path_of(recipe, name)
        if path is None and name == "teacher":
            raise ConfigError(f"{algorithm.name} learns from a teacher: give teacher.path, a Hugging Face directory")
        own = _copied(name, model) if path is None else _checked(name, path, recipe, model)
        if objective is None:
            group = workers.group(own, Job(name, TrainConfig(micro_batch_tokens=recipe.train.micro_batch_tokens), None))
            topk = cast("int", algorithm.params["topk"]) if "top_ids" in outputs.values() else 0
            reset_every = section.reset_every if isinstance(section, ReferenceSection) else 0
            top = min(topk, model.tokenizer.vocab_size)
            roles.append(Role(name, own, path, group, outputs, reset_every=reset_every, top=top))
            continue
        settings = _trained(recipe, name)
        group = workers.group(own, Job(name, settings.train.over(updates), objective))
        roles.append(Role(name, own, path, group, outputs, objective, settings.warmup_steps))
    return Roles(tuple(roles))


def path_of(recipe: Recipe, name: str) -> Path | None:
    """The directory that a role's model comes from; None: it is a copy of the policy."""
    section = _section(recipe, name)
    return section.path if section is not None else None


def base_stages(recipe: Recipe, algorithm: Algorithm, policy: WorkerGroup) -> list[BatchStage]:
    """The reference of a policy with an adapter: the policy without it, so that there is no role.

    Raises ConfigError for a reference that would change.
    """
    if not _is_base(recipe) or "reference" not in {name for name, _, _ in _used(recipe, algorithm)}:
        return []
    if recipe.reference is not None and recipe.reference.reset_every:
        raise ConfigError(
            f"reference.reset_every={recipe.reference.reset_every}: with lora the reference is the frozen model, which does not "
            "change; give reference.path a model of its own"
        )
    return [stages.model_outputs("reference", policy, {"ref_logprobs": "base_logprobs"}, "frozen")]


def merged(recipe: Recipe, algorithm: Algorithm, model: Path) -> Recipe:
    """The recipe of the model that a run left in a directory: its adapter is a part of it, its reference what it began as."""
    alone = replace(recipe, model=replace(recipe.model, path=model, new=None), warmup=None, lora=None)
    if not _is_base(recipe) or "reference" not in {name for name, _, _ in _used(recipe, algorithm)}:
        return alone
    return replace(alone, reference=ReferenceSection(recipe.model.path))


def _is_base(recipe: Recipe) -> bool:
    """Whether the reference is the policy's own frozen model."""
    return recipe.lora is not None and path_of(recipe, "reference") is None


def _used(recipe: Recipe, algorithm: Algorithm) -> list[tuple[str, Mapping[str, str], Algorithm | None]]:
    """Each role that something reads a column of: its name, those columns, and what it is trained for."""
    wanted, found = reads(algorithm), list[tuple[str, Mapping[str, str], Algorithm | None]]()
    for name, kind in KINDS.items():
        outputs = {column: output for column, output in kind.outputs.items() if column in wanted}
        if not outputs or (kind.judges and _section(recipe, name) is None):
            continue
        objective = _objective(recipe, name, kind.objective, algorithm) if kind.objective is not None else None
        if objective is not None:
            wanted |= reads(objective)
        found.append((name, outputs, objective))
    return found


def _objective(recipe: Recipe, name: str, row_name: str, algorithm: Algorithm) -> Algorithm:
    """What a role is trained for; a parameter that the policy's row has too is set there, for both.

    Episodes that are drawn anew for the policy are drawn for it, too (PF-PPO).
    """
    given = _trained(recipe, name).params
    row = configure(row_name, given)
    shared = {key: value for key, value in algorithm.params.items() if key in row.params and key not in AGGREGATION}
    if twice := shared.keys() & given.keys():
        raise ConfigError(f"{name}.{min(twice)} is also a parameter of {algorithm.name}: set algorithm.{min(twice)}, for both")
    return replace(row, params={**row.params, **shared, "resampling": algorithm.params.get("resampling")})


def _trained(recipe: Recipe, name: str) -> TrainedSection:
    return {"critic": recipe.critic or CriticSection(), "process_model": recipe.process_model or ProcessModelSection()}[name]


def _section(recipe: Recipe, name: str) -> ReferenceSection | TeacherSection | RewardModelSection | TrainedSection | None:
    return {
        "critic": recipe.critic,
        "process_model": recipe.process_model,
        "reference": recipe.reference,
        "teacher": recipe.teacher,
        "reward_model": recipe.reward_model,
    }[name]


def _copied(name: str, model: Model) -> Blueprint:
    """A model like the policy. Raises ConfigError for one of values, where that has none."""
    kind: type[LanguageModel] = KINDS[name].model
    if not isinstance(model.decoder, Decoder):
        if kind is ValueModel:
            raise ConfigError(f"{name} would be a copy of the policy with a value head, which a model of transformers has not")
        kind = type(model.decoder)
    return Blueprint(kind, model.decoder.config, model.decoder.dtype)


def _checked(name: str, path: Path, recipe: Recipe, model: Model) -> Blueprint:
    """The model of a role's own directory, which must read the policy's tokens."""
    if not path.is_dir():
        source = "; tandem train recipes/reward_model.yaml leaves one in its run's final/" if KINDS[name].judges else ""
        raise ModelError(f"{name}.path={path} is no directory: give that of a model with its tokenizer{source}")
    mine, theirs = model.tokenizer.vocabulary, load_tokenizer(path).vocabulary
    if differ := sorted(token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token)):
        first = differ[0]
        raise ConfigError(
            f"{name}.path={path} has another vocabulary than the policy, whose tokens it must score: {len(differ)} tokens differ, "
            f"the first is {first!r}, {mine.get(first, 'absent')} in the policy's and {theirs.get(first, 'absent')} there"
        )
    own = Blueprint(KINDS[name].model, read_config(path), model.decoder.dtype)
    check_values(own.outline(), path)
    if KINDS[name].judges and not has_value_head(path):
        raise ModelError(f"{name}.path={path} holds no reward model but one of language, without a head that scores")
    check_fit(own.config.vocab_size, own.config.max_positions, model.tokenizer, recipe, f"{name}.path={path}")
    return own
