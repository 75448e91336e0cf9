"""The models beside the policy: which of them an algorithm needs, what each gives, and where its weights come from.

A role is there if a column that it gives is read, and not otherwise. Its model is that of its own directory, or a copy of
the policy as it is when the main phase begins, which `runs/NAME/initial` holds, so that a resumed run has the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.algos.columns import reads
from tandem.assemble.model import Model, check_fit
from tandem.errors import ConfigError
from tandem.models.decoder import Decoder
from tandem.models.hf import load_decoder, load_weights
from tandem.ports import TransferQueue, WorkerGroup
from tandem.recipe import Recipe, ReferenceSection, TeacherSection
from tandem.runtime.inline import InlineGroup
from tandem.text.tokenizer import load_tokenizer
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer import stages
from tandem.trainer.plan import BatchStage
from tandem.trainer.workers import ModelWorker
from tandem.types import Algorithm

FROZEN: Mapping[str, Mapping[str, str]] = {
    "reference": {"ref_logprobs": "logprobs"},
    "teacher": {"teacher_logprobs": "logprobs"},
}
"""The columns that each frozen role gives, and the output of its engine that each of them is."""


@dataclass(frozen=True)
class Role:
    """A model beside the policy. path: where its weights come from; None: from the policy as the phase begins."""

    name: str
    model: Decoder
    path: Path | None
    workers: WorkerGroup
    outputs: Mapping[str, str]

    @property
    def stage(self) -> BatchStage:
        return stages.model_outputs(self.name, self.workers, self.outputs, "frozen")


def check_roles(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raises ConfigError for a role that is set and that the main phase has no use for."""
    for name, outputs in FROZEN.items():
        if _section(recipe, name) is not None and not _read(algorithm, outputs):
            raise ConfigError(
                f"{name} is set, and {algorithm.name} with its parameters reads no {' or '.join(outputs)}: leave it out"
            )


def build_roles(recipe: Recipe, model: Model, algorithm: Algorithm, queue: TransferQueue) -> tuple[Role, ...]:
    """The roles whose columns the algorithm reads. Raises ConfigError or ModelError where one lacks a model that fits."""
    roles: list[Role] = []
    for name, outputs in FROZEN.items():
        if read := _read(algorithm, outputs):
            section = _section(recipe, name)
            path = section.path if section is not None else None
            if path is None and name == "teacher":
                raise ConfigError(f"{algorithm.name} learns from a teacher: give teacher.path, a Hugging Face directory")
            roles.append(_frozen(name, path, read, recipe, model, queue))
    return tuple(roles)


def _section(recipe: Recipe, name: str) -> ReferenceSection | TeacherSection | None:
    return {"reference": recipe.reference, "teacher": recipe.teacher}[name]


def _read(algorithm: Algorithm, outputs: Mapping[str, str]) -> dict[str, str]:
    """Those of a role's columns that the algorithm reads."""
    wanted = reads(algorithm)
    return {column: output for column, output in outputs.items() if column in wanted}


def _frozen(name: str, path: Path | None, outputs: Mapping[str, str], recipe: Recipe, model: Model, queue: TransferQueue) -> Role:
    decoder = Decoder(model.decoder.config, model.decoder.dtype) if path is None else _load(name, path, recipe, model)
    engine = TorchEngine(decoder, TrainConfig(micro_batch_tokens=recipe.train.micro_batch_tokens))
    return Role(name, decoder, path, InlineGroup((ModelWorker(engine, queue),)), outputs)


def _load(name: str, path: Path, recipe: Recipe, model: Model) -> Decoder:
    """The model of a role's own directory, which must read the policy's tokens."""
    mine, theirs = model.tokenizer.vocabulary, load_tokenizer(path).vocabulary
    if differ := sorted(token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token)):
        first = differ[0]
        raise ConfigError(
            f"{name}.path={path} has another vocabulary than the policy, whose tokens it must score: {len(differ)} tokens differ, "
            f"the first is {first!r}, {mine.get(first, 'absent')} in the policy's and {theirs.get(first, 'absent')} there"
        )
    decoder = load_decoder(path, model.decoder.dtype)
    check_fit(decoder, model.tokenizer, recipe, f"{name}.path={path}")
    return decoder


def copies(roles: Sequence[Role]) -> tuple[Role, ...]:
    """Those whose model is the policy's as the phase begins."""
    return tuple(role for role in roles if role.path is None)


def begin(roles: Sequence[Role], initial: Path) -> None:
    """Gives the copies their weights, from the directory of the policy as it was when the phase began."""
    for role in copies(roles):
        load_weights(role.model, initial)
