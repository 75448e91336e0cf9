"""Datasets in files on this machine: JSON lines and parquet. What the columns mean stands in rows.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, cast

from tandem.data.rows import tasks_from_rows
from tandem.errors import DataError
from tandem.types import Task


class FileDataset:
    """A task a line of a .jsonl file or a row of a .parquet file, read whole and checked when it is made.

    Implements the Dataset port. columns: {ours: theirs} where the file uses other names. Raises DataError with the file
    and the line (from 1) or row (from 0) of what is wrong.
    """

    def __init__(self, path: Path, columns: Mapping[str, str] = MappingProxyType({})) -> None:
        readers = {".jsonl": _lines, ".parquet": _rows}
        if path.suffix not in readers:
            raise DataError(f"{path} is neither .jsonl nor .parquet: convert it, or rename it if it is one of them")
        if not path.is_file():
            raise DataError(f"there is no dataset file {path}: correct the path (relative paths start at {Path.cwd()})")
        self.name = path.stem
        self._tasks = tasks_from_rows(readers[path.suffix](path), self.name, columns)
        if not self._tasks:
            raise DataError(f"the dataset {path} is empty: it needs at least one row")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row: object = json.loads(line, parse_constant=refuse)
        except ValueError as error:
            raise DataError(f"{where} is not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where} holds {row!r}; every line must be a JSON object")
        yield where, cast("dict[str, object]", row)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

    try:
        rows = cast("list[dict[str, object]]", parquet.read_table(path).to_pylist())
    except ValueError as error:
        raise DataError(f"{path} is not a parquet file: {error}") from None
    for number, row in enumerate(rows):
        yield f"{path} row {number}", row
