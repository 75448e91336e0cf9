"""What is trained, with its text side: decoder, tokenizer, chat template."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tandem import device
from tandem.assemble import library
from tandem.assemble.adapter import put_adapter
from tandem.assemble.tasks import PREFIX, problem, sections
from tandem.durable import attempt
from tandem.errors import ConfigError, DeviceError, ModelError
from tandem.faults import crash_point
from tandem.models.decoder import Decoder, init_decoder
from tandem.models.decoder_config import DecoderConfig
from tandem.models.hf import family_of, load_decoder, load_value_model, read_config, save_decoder
from tandem.models.language_model import LanguageModel
from tandem.models.probe import ProbeResult, probe
from tandem.models.values import ValueModel
from tandem.recipe import ModelSection, Recipe
from tandem.text.renderer import PLAIN_TEMPLATE, TemplateRenderer
from tandem.text.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from tandem.trainer.sampler import seed_of

ADAPTER = "adapter"  # in the directory of a model that was trained by one


@dataclass(frozen=True)
class Model:
    """What is trained, with its text side; the probe says which law its numbers are under on this machine, if it generates.

    top_layers: of the model, those that are trained; 0 is all.
    """

    decoder: LanguageModel
    tokenizer: Tokenizer
    renderer: TemplateRenderer
    probed: ProbeResult | None
    top_layers: int = 0

    def describe(self) -> str:
        count, trained = self.sizes
        size = f"{count:,} parameters" + (f", of which {trained:,} are trained" if trained < count else "")
        law = f"rollout and trainer logprobs: {self.probed.law}" if self.probed is not None else "trained by transformers' code"
        return f"model: {size}, {self.tokenizer.vocab_size} tokens; {law}"

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters, and those that are trained."""
        parameters, adapter = dict(self.decoder.named_parameters()), self.decoder.adapter
        names = parameters.keys() - self.decoder.below(self.top_layers) if adapter is None else adapter.names
        return sum(each.numel() for each in parameters.values()), sum(parameters[name].numel() for name in names)

    def save(self, directory: Path) -> None:
        """As a Hugging Face directory, which is whole or as it was.

        An adapter is merged into it, and beside it in `adapter`, as PEFT reads it.
        """
        with whole_directory(directory) as partial:
            if isinstance(self.decoder, Decoder):
                save_decoder(self.decoder, partial, self.tokenizer.eos_id)
            else:
                library.save(self.decoder, partial)
            self.tokenizer.save(partial)
            if self.decoder.adapter is not None:
                (partial / ADAPTER).mkdir()
                self.decoder.adapter.save(partial / ADAPTER)


@contextmanager
def whole_directory(directory: Path) -> Generator[Path]:
    """A directory to write into, which takes the place of `directory` when all of it is written. Raises SnapshotError, and
    ConfigError where no directory can be.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    with attempt(f"write {directory}", directory.parent):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ConfigError(f"the directory {directory} cannot be made ({error.strerror}): name another one") from None
        yield partial
        crash_point(f"{directory.name}.before_rename")
        shutil.rmtree(directory, ignore_errors=True)
        crash_point(f"{directory.name}.in_rename")
        partial.rename(directory)


def build_model(recipe: Recipe, kind: type[Decoder] = Decoder) -> Model:
    """kind: what holds the weights of model.path. Raises ModelError, DeviceError or ConfigError for what cannot be built."""
    here = device.select(recipe.run.device)
    if here.kind != "cpu":
        raise DeviceError(
            f"run.device={recipe.run.device} is not supported by this version, which runs on the CPU; use run.device=cpu"
        )
    device.configure_threads(recipe.run.threads)
    dtype = here.dtype({"float32": "fp32", "bfloat16": "bf16"}[recipe.model.dtype])
    tokenizer = _tokenizer(recipe)
    template = _template(recipe.model.template) if recipe.model.template is not None else None
    if recipe.model.path is not None and recipe.model.library == "transformers":
        if kind is ValueModel:
            raise ConfigError(f"{recipe.algorithm.name} trains a model of values, which model.library=transformers has not")
        decoder = library.load(recipe.model.path, dtype)
    elif recipe.model.path is not None:
        check_memory(_outlasts(read_config(recipe.model.path)))
        decoder = (load_value_model if kind is ValueModel else load_decoder)(recipe.model.path, dtype)
    else:
        check_memory(_outlasts(shape := _shape(recipe.model, tokenizer)))
        decoder = init_decoder(shape, seed_of(recipe.seed, "weights"), dtype)
    check_fit(decoder.config.vocab_size, decoder.max_positions, tokenizer, recipe, "the model")
    if unknown := [stop for stop in recipe.sampling.stop_ids if not 0 <= stop < decoder.config.vocab_size]:
        raise ConfigError(
            f"sampling.stop_ids holds {unknown[0]}, and the model has {decoder.config.vocab_size} tokens: give such ids, or "
            f"texts as sampling.stop"
        )
    lora, seed, origin = recipe.lora, seed_of(recipe.seed, "adapter"), _absolute(recipe.model.path)

    def adapt(model: LanguageModel) -> None:
        if lora is not None:
            put_adapter(model, lora, seed, origin)

    adapt(decoder)
    probed = probe(decoder.config, dtype, adapt) if isinstance(decoder, Decoder) else None
    return Model(decoder, tokenizer, TemplateRenderer(tokenizer, template), probed, recipe.train.top_layers)


def count_parameters(config: DecoderConfig) -> int:
    """Of a decoder of this shape, which is not made; layers are alike."""
    with torch.device("meta"):
        one, two = (Decoder(replace(config, num_layers=layers, unrotated=(), max_positions=1)) for layers in (1, 2))
    first, both = (sum(parameter.numel() for parameter in each.parameters()) for each in (one, two))
    return first + (config.num_layers - 1) * (both - first)


def fits(planned: Mapping[str, int]) -> bool:
    """Whether this machine has so many bytes, whoever holds them now."""
    return sum(planned.values()) <= device.select("cpu").memory().total_bytes


def check_memory(planned: Mapping[str, int]) -> None:
    """planned: bytes, by what they are for. Raises ConfigError where this machine has less."""
    if not fits(planned):
        total, there = sum(planned.values()), device.select("cpu").memory().total_bytes
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in planned.items() if size > total / 100)
        raise ConfigError(
            f"the run would hold {_gib(total)} of memory from step to step, and this machine has {_gib(there)}: {parts}; choose a "
            f"smaller model, train its last layers (train.top_layers) or an adapter (lora), or lower engine.slots or max_context"
        )


def _outlasts(config: DecoderConfig) -> dict[str, int]:
    """What is held of a model of this shape, trained or not."""
    return {"weights": 4 * count_parameters(config), "rotary positions": 8 * config.max_positions * config.head_dim}


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def check_fit(vocab_size: int, max_positions: int | None, tokenizer: Tokenizer, recipe: Recipe, what: str) -> None:
    """Raises ModelError or ConfigError for a model that cannot read the tokens, or the length, of the run's rows."""
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"the tokenizer of {tokenizer.origin} has {tokenizer.vocab_size} tokens and {what} {vocab_size}; "
            f"a model goes with the tokenizer of its own directory"
        )
    if max_positions is not None and recipe.engine.max_context > max_positions:
        raise ConfigError(
            f"engine.max_context={recipe.engine.max_context} is above the {max_positions} positions of {what}: lower it"
        )


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"model.template={path} cannot be read: {problem}; give a text file with a chat template") from problem


def _tokenizer(recipe: Recipe) -> Tokenizer:
    directory = recipe.model.tokenizer or recipe.model.path
    if directory is not None:
        return load_tokenizer(directory)
    places = [place for section in sections(recipe) for place in (section, *section.sources)]
    kinds = [problem(place.task) for place in places if place.task is not None and not place.task.startswith(PREFIX)]
    if not kinds:
        raise ConfigError(
            "model.new without model.tokenizer takes one token a character of its built-in task, and data names none; "
            "give model.tokenizer a Hugging Face directory"
        )
    return character_tokenizer("".join(sorted(set("".join(kind.characters for kind in kinds)))), template=PLAIN_TEMPLATE)


def _shape(model: ModelSection, tokenizer: Tokenizer) -> DecoderConfig:
    new = model.new
    assert new is not None
    try:
        shape = DecoderConfig(
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
        family_of(shape)  # which it must have, to be written at the end
    except ValueError as problem:
        raise ConfigError(f"model.new: {problem}") from problem
    return shape
