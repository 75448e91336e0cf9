"""The sections of a recipe: what a user may write in one file.

Each component's section is the config that stands beside its class; the sections here say which components there are
and what passes between them. Nothing is built here: `assemble` does that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from tandem.algos.columns import as_mapping
from tandem.algos.table import configure
from tandem.checkpoint.publisher import CheckpointConfig
from tandem.checkpoint.snapshots import SnapshotConfig
from tandem.config import Resolved, load
from tandem.data.builtin import NoiseConfig
from tandem.data.curriculum import CurriculumConfig
from tandem.data.hub import HubConfig
from tandem.errors import RegistryError
from tandem.models.adapters import LoraConfig
from tandem.queue.memory import QueueConfig
from tandem.rewards.config import RewardConfig
from tandem.rollout.native import NativeConfig
from tandem.runtime.placement import RuntimeConfig, SettledRuntime
from tandem.train.config import TrainConfig
from tandem.trainer.evaluate import EvaluationConfig
from tandem.trainer.learner import LearnerConfig
from tandem.trainer.schedule import Mode, Schedule, TooOld, schedule
from tandem.trainer.source import RolloutConfig
from tandem.types import Json, SamplingParams

_LONGEST_NAME = 255  # bytes, of a file on Linux


@dataclass(frozen=True)
class RunSection:
    """name: the run is in runs/NAME. dir: in exactly this directory instead. device: cpu; threads: of torch in this process."""

    name: str = "run"
    dir: Path | None = None
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.name in ("", "..") or Path(self.name).name != self.name:
            raise ValueError(f"name={self.name!r} must be one plain directory name; use dir for a path")
        for part in self.directory.parts:
            if "\0" in part or len(os.fsencode(part)) > _LONGEST_NAME:
                raise ValueError(
                    f"{part[:40]!r}, of {len(part)} characters, can be the name of no directory: choose another name or dir"
                )

    @property
    def directory(self) -> Path:
        return self.dir if self.dir is not None else Path("runs") / self.name


@dataclass(frozen=True)
class ShapeSection:
    """A new decoder with random weights. The vocabulary is the tokenizer's; head_dim 0 is hidden_size / num_heads."""

    hidden_size: int = 64
    intermediate_size: int = 176
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 0
    max_positions: int = 256
    rope_theta: float = 10_000.0
    tie_embeddings: bool = True
    attention_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True)
class ModelSection:
    """Either path, a Hugging Face directory with model and tokenizer, or new, a shape to begin from scratch with.

    tokenizer: directory of another tokenizer; a new model without one gets one token a character of its built-in task.
    template: file with a chat template (Jinja) in place of the tokenizer's. dtype: of products; weights are float32.
    library: whose code computes a model of path: tandem's, which also generates, or that of transformers, for any causal
    language model, which is trained on a dataset alone.
    """

    path: Path | None = None
    new: ShapeSection | None = None
    tokenizer: Path | None = None
    template: Path | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    library: Literal["tandem", "transformers"] = "tandem"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.new is None):
            raise ValueError("give one of path (a Hugging Face directory) and new (a shape to begin from scratch with)")
        if self.new is not None and self.library != "tandem":
            raise ValueError(f"new is a shape of tandem's decoder, which library={self.library} does not compute: give path")


@dataclass(frozen=True)
class _OriginSection:
    """One place that tasks come from.

    One of task, a built-in one or reasoning_gym/NAME, of which `size` different problems are taken; path, a .jsonl, .parquet or
    .csv file; and hub, what the package datasets reads. columns: {ours: theirs} where they have other names. demonstrations:
    solved, failed and refused problems of the task instead of open ones, for supervised training. refusal_frac: of the task's
    pairs, those in which the rejected response is a refusal and not a mistake.
    """

    task: str | None = None
    path: Path | None = None
    hub: HubConfig | None = None
    size: int = 1024
    columns: dict[str, str] = field(default_factory=dict[str, str])
    demonstrations: NoiseConfig | None = None
    refusal_frac: float = 0.0

    def __post_init__(self) -> None:
        if self.task is None and self.demonstrations is not None:
            raise ValueError("demonstrations are made for a built-in task; other data holds its own as messages")
        if not 0 <= self.refusal_frac <= 1:
            raise ValueError(f"refusal_frac={self.refusal_frac} is not between 0 and 1")
        if self.task is None and self.refusal_frac:
            raise ValueError(f"refusal_frac={self.refusal_frac} is of a built-in task's pairs; other data holds its own")

    def _given(self) -> list[str]:
        return [name for name in ("task", "path", "hub") if getattr(self, name) is not None]


@dataclass(frozen=True)
class SourceSection(_OriginSection):
    """One of several. weight: its share of the tasks, beside those of the others; null everywhere: as many as it has."""

    weight: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self._given()) != 1:
            raise ValueError("a source is one of task (a built-in one), path (a file) and hub (a Hugging Face dataset)")
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"weight={self.weight} must be above 0: leave a source out that is to give nothing")


@dataclass(frozen=True)
class DatasetSection(_OriginSection):
    """Where tasks come from: one place, or several sources. max_tokens: tasks with more are left out, which is said. curriculum:
    which tasks, and in which order, by how often they were solved.

    It counts the tokens of a prompt; where what is written is trained on, those of the conversation, or of a pair's longer side.
    """

    sources: tuple[SourceSection, ...] = ()
    max_tokens: int | None = None
    curriculum: CurriculumConfig | None = None

    @property
    def shuffled(self) -> bool:
        return self.curriculum is None or not self.curriculum.easy_first

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self._given()) + bool(self.sources) != 1:
            raise ValueError(
                "give one of task (a built-in one), path (a .jsonl, .parquet or .csv file), hub (a Hugging Face dataset) and "
                "sources (a list of several)"
            )
        if self.sources and self.columns:
            raise ValueError("columns belong to each of the sources: write them there")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("some sources have a weight and some have none: give each one, or none of them")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")


@dataclass(frozen=True)
class DataSection:
    """train: what the policy is trained on. heldout: what it is measured on, before, during and after; optional."""

    train: DatasetSection
    heldout: DatasetSection | None = None


@dataclass(frozen=True)
class AgentSection:
    """name: single_turn, env, or the path of your own AgentLoop. env: calculator, or the path of your own Env.
    max_turns: assistant turns of an episode in an environment.
    """

    SHORTHAND: ClassVar[str] = "name"

    name: str = "single_turn"
    env: str | None = None
    max_turns: int = 4

    def __post_init__(self) -> None:
        if (self.name == "env") != (self.env is not None):
            raise ValueError(f"name={self.name} and env={self.env}: an environment goes with name=env, and only with it")
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")


@dataclass(frozen=True)
class AlgorithmSection:
    """name: a row of the algorithm table, or the path of your own. Any other key is a parameter of that row."""

    SHORTHAND: ClassVar[str] = "name"
    EXTRA: ClassVar[str] = "params"

    name: str = "grpo"
    params: dict[str, Json] = field(default_factory=dict[str, Json])

    def __post_init__(self) -> None:
        _check_row(self.name, self.params)


@dataclass(frozen=True)
class ReferenceSection:
    """The model that a KL penalty is measured to. path: a Hugging Face directory; without it, the policy as it began.

    reset_every: steps after which it becomes the policy as it is then, whose optimiser begins anew (ProRL); 0 is never.
    """

    path: Path | None = None
    reset_every: int = 0

    def __post_init__(self) -> None:
        if self.reset_every < 0:
            raise ValueError(f"reset_every must not be negative, got {self.reset_every}")


@dataclass(frozen=True)
class TeacherSection:
    """The model that is distilled. path: a Hugging Face directory with the vocabulary of the policy."""

    path: Path


@dataclass(frozen=True)
class RewardModelSection:
    """The model whose scores are the rewards that are trained on; `reward`, where there is one, then judges held-out tasks only.

    path: a Hugging Face directory with the vocabulary of the policy: a sequence classifier with one label, as algorithm
    reward_model leaves in final/.
    """

    path: Path


@dataclass(frozen=True)
class TrainedSection:
    """A model that is trained beside the policy. Any further key is a parameter of its objective, the row OBJECTIVE.

    path: a Hugging Face directory with the vocabulary of the policy; without it, the policy as it began. A critic without a
    value head there begins with one of zeros. train: its optimiser. warmup_steps: steps of the run in which the policy is not
    trained yet.
    """

    EXTRA: ClassVar[str] = "params"
    OBJECTIVE: ClassVar[str]

    path: Path | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    warmup_steps: int = 0
    params: dict[str, Json] = field(default_factory=dict[str, Json])

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        _check_row(self.OBJECTIVE, self.params)


@dataclass(frozen=True)
class CriticSection(TrainedSection):
    """What gives values. See TrainedSection."""

    OBJECTIVE: ClassVar[str] = "value"


@dataclass(frozen=True)
class ProcessModelSection(TrainedSection):
    """The process reward model of PRIME. See TrainedSection."""

    OBJECTIVE: ClassVar[str] = "implicit_prm"


def _check_row(name: str, params: Mapping[str, Json]) -> None:
    """Raises ValueError for parameters that a row of the table has not. What is somebody's own is loaded by those who use it."""
    if any(":" in each for each in (name, *as_mapping(params.get("correction")))):
        return
    try:
        configure(name, params)
    except RegistryError as problem:
        raise ValueError(str(problem)) from problem


@dataclass(frozen=True)
class TrainerSection:
    """steps: updates of the policy's version. eval_every, snapshot_every: in steps; 0 is only at the end.

    restarts: how often a run goes on by itself, from its last snapshot, where a worker's process died and no step or snapshot was
    new since it did so last; 0: a death ends it.
    mode, staleness, window, too_old: see trainer.schedule.Schedule.
    """

    steps: int = 100
    mode: Mode = "sync"
    staleness: int | None = None
    window: int = 0
    too_old: TooOld | None = None
    eval_every: int = 0
    snapshot_every: int = 0
    restarts: int = 1

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("eval_every", 0), ("snapshot_every", 0), ("restarts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def schedule(self) -> Schedule:
        """Raises ConfigError for values that contradict each other."""
        return schedule(self.mode, self.staleness, self.window, self.too_old)


@dataclass(frozen=True)
class WarmupSection:
    """Supervised fine-tuning before the main phase: the same loop with a dataset as its source."""

    data: DatasetSection
    steps: int = 100
    rows_per_step: int = 64
    snapshot_every: int = 0
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("rows_per_step", 1), ("snapshot_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Recipe:
    """A whole run. seed: everything random follows from it.

    logs: where metrics go besides metrics.jsonl: console, tensorboard, wandb, mlflow, swanlab, trackio, or the path of your own.
    """

    model: ModelSection
    data: DataSection
    seed: int = 0
    run: RunSection = field(default_factory=RunSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    lora: LoraConfig | None = None
    reference: ReferenceSection | None = None
    teacher: TeacherSection | None = None
    critic: CriticSection | None = None
    process_model: ProcessModelSection | None = None
    agent: AgentSection = field(default_factory=AgentSection)
    reward: RewardConfig | None = None
    reward_model: RewardModelSection | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: NativeConfig = field(default_factory=NativeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    warmup: WarmupSection | None = None
    queue: QueueConfig = field(default_factory=QueueConfig)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    logs: tuple[str, ...] = ("console", "tensorboard")

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.lora is not None and self.model.path is None:
            raise ValueError("lora freezes the model, and the weights of model.new are random: give model.path")
        if self.lora is not None and self.train.top_layers:
            raise ValueError("lora and train.top_layers: an adapter is all that is trained of a model; leave one out")
        if self.lora is not None and self.warmup is not None:
            raise ValueError("lora and warmup: what is warmed up is the model, and lora freezes it; warm up in a run of its own")
        _ = self.placement

    @property
    def placement(self) -> SettledRuntime:
        """The section `runtime`, with what it leaves out. Raises ValueError for values that contradict each other."""
        return self.runtime.settled(beside_generation=self.trainer.mode == "separate_async")


def load_recipe(path: Path, overrides: Sequence[str]) -> Resolved[Recipe]:
    """Raises ConfigError with every problem of the file and the overrides."""
    return load(path, overrides, Recipe)
