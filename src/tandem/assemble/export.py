"""From a run's snapshot to a Hugging Face directory, of the policy or of a model that was trained beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from tandem.algos.table import learns_values
from tandem.assemble.model import build_model
from tandem.assemble.phases import algorithm, first_trained
from tandem.assemble.roles import KINDS, path_of
from tandem.assemble.workers import Blueprint
from tandem.checkpoint.snapshots import Snapshot, SnapshotStore
from tandem.errors import ConfigError
from tandem.models.decoder import Decoder
from tandem.models.hf import read_config
from tandem.models.values import value_model_on
from tandem.recipe import Recipe
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine

Which = int | Literal["latest", "best"]


def export(recipe: Recipe, which: Which, role: str, directory: Path) -> Snapshot:
    """Writes the model of `role` as a snapshot of the recipe's run has it, with the tokenizer; the snapshot that was taken.

    Raises ConfigError for a run without such a snapshot, for one without a model of that role, and for a directory that is
    not empty.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there and not an empty directory: give one that export can make")
    snapshot = _snapshot(recipe, which)
    part = "train" if role == "policy" else role
    there = ["policy" if path.name == "train" else path.name for path in sorted(snapshot.path.iterdir()) if path.name in _PARTS]
    if role not in there:
        raise ConfigError(f"{snapshot.path} holds no model of role {role!r}; it holds {', '.join(there)}")
    model = build_model(recipe, first_trained(recipe))
    if learns_values(algorithm(recipe)):
        assert isinstance(model.decoder, Decoder), "a run that trains values has such a decoder"
        model = replace(model, decoder=value_model_on(model.decoder))
    if role != "policy":
        path = path_of(recipe, role)
        config = model.decoder.config if path is None else read_config(path)
        model = replace(model, decoder=Blueprint(KINDS[role].model, config, model.decoder.dtype).build())
    TorchEngine(model.decoder, TrainConfig()).load(snapshot.part(part))
    model.save(directory)
    return snapshot


_PARTS = {"train", *KINDS}


def _snapshot(recipe: Recipe, which: Which) -> Snapshot:
    path = recipe.run.directory / "snapshots"
    store = SnapshotStore(path, recipe.snapshots, {}) if path.is_dir() else None
    if store is None or not store.steps:
        raise ConfigError(f"there are no snapshots in {path}: a run writes one at its end, and every trainer.snapshot_every steps")
    found = store.latest() if which == "latest" else store.best() if which == "best" else store.at(which)
    if found is None:
        of = f"step {which}" if isinstance(which, int) else f"the {which} one"
        raise ConfigError(f"{path} does not hold {of}; its steps are {', '.join(map(str, store.steps))}")
    return found
