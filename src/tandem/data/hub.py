"""Datasets that the package `datasets` reads: of the Hugging Face hub by id, or in a directory. An extra: `datasets`."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

from tandem.data.files import Rows
from tandem.data.rows import tasks_from_rows
from tandem.errors import DataError
from tandem.types import Task


@dataclass(frozen=True, slots=True)
class HubConfig:
    """path: an id ("openai/gsm8k"), or a directory with files or with what `save_to_disk` wrote. subset: of an id that has
    several. split: "train", "test", or a part of one ("train[:1000]").
    """

    SHORTHAND: ClassVar[str] = "path"

    path: str
    subset: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        return "/".join(part for part in (self.path, self.subset, self.split) if part)


class HubDataset:
    """A task a row. Implements the Dataset port. Raises DataError where it cannot be had, or with the row that is wrong."""

    def __init__(self, config: HubConfig, columns: Mapping[str, str] = MappingProxyType({})) -> None:
        self.name = Path(config.path).name
        self._tasks = tasks_from_rows(hub_rows(config), self.name, columns)
        if not self._tasks:
            raise DataError(f"the dataset {config} is empty: it needs at least one row")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]


def hub_rows(config: HubConfig) -> Rows:
    """Raises DataError, at once where the package is missing or does not find the dataset."""
    try:
        import datasets  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
    except ModuleNotFoundError:
        raise DataError(
            f"the dataset {config} is read by the package datasets, which is not installed: pip install 'tandem-rl[datasets]'"
        ) from None
    library = cast("Any", datasets)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each try that fails would be told
    try:
        if (Path(config.path) / "state.json").is_file() or (Path(config.path) / "dataset_dict.json").is_file():
            found = library.load_from_disk(config.path)
            found = found[config.split] if hasattr(found, "keys") else found
        else:
            found = library.load_dataset(config.path, config.subset, split=config.split)
    except ConnectionError:
        raise DataError(
            f"the dataset {config} is not here, and the hub is not reached from this machine: fetch it elsewhere and give the path "
            f"of its directory, or of a file of it"
        ) from None
    except (OSError, ValueError, LookupError, library.exceptions.DatasetsError) as problem:
        said = textwrap.shorten(str(problem), 300, placeholder=" ...")
        raise DataError(f"the dataset {config} cannot be had: {said}; correct its name, subset or split") from None
    return _rows(config, found)


def _rows(config: HubConfig, found: Any) -> Iterator[tuple[str, Mapping[str, object]]]:
    for number, row in enumerate(found):
        yield f"{config} row {number}", row
