"""Datasets in files on this machine: JSON lines, parquet and CSV. What the columns mean stands in rows.py."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, cast

from tandem.data.rows import tasks_from_rows
from tandem.errors import DataError
from tandem.types import Task

Rows = Iterator[tuple[str, Mapping[str, object]]]
"""Each row with its place, for messages."""


class FileDataset:
    """A task a line of a .jsonl file or a row of a .parquet or .csv file, read whole and checked when it is made.

    Implements the Dataset port. columns: {ours: theirs} where the file uses other names. Raises DataError with the file
    and the line (from 1) or row (from 0) of what is wrong.
    """

    def __init__(self, path: Path, columns: Mapping[str, str] = MappingProxyType({})) -> None:
        self.name = path.stem
        self._tasks = tasks_from_rows(file_rows(path), self.name, columns)
        if not self._tasks:
            raise DataError(f"the dataset {path} is empty: it needs at least one row")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]


def file_rows(path: Path) -> Rows:
    """The rows of a file, by the end of its name. Raises DataError, at once where it cannot be read at all."""
    if path.is_dir():
        raise DataError(f"{path} is a directory: give one of its files, or name it as hub (it is read by the package datasets)")
    if path.suffix not in _READERS:
        raise DataError(f"{path} is none of {', '.join(_READERS)}: convert it, or rename it if it is one of them")
    if not path.is_file():
        raise DataError(f"there is no dataset file {path}: correct the path (relative paths start at {Path.cwd()})")
    return _READERS[path.suffix](path)


def _lines(path: Path) -> Rows:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row: object = json.loads(line.decode("utf-8-sig"), parse_constant=refuse)
        except UnicodeDecodeError:
            raise DataError(f"{where} is not UTF-8: write the file again in that encoding") from None
        except ValueError as error:
            raise DataError(f"{where} is not valid JSON: {error}") from None
        except RecursionError:
            raise DataError(f"{where} is nested too deeply: make its lists and objects flatter") from None
        if not isinstance(row, dict):
            raise DataError(f"{where} holds {row!r}; every line must be a JSON object")
        yield where, cast("dict[str, object]", row)


def _parquet(path: Path) -> Rows:
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

    try:
        rows = cast("list[dict[str, object]]", parquet.read_table(path).to_pylist())
    except ValueError as error:
        raise DataError(f"{path} is not a parquet file: {error}") from None
    for number, row in enumerate(rows):
        yield f"{path} row {number}", row


_NOT_COMMAS = ";\t|"
"""What other programs separate the cells of a CSV file by."""


def _csv(path: Path) -> Rows:
    """Every cell is a text, so that 007 stays what it is; an empty one is nothing. The first line names the columns."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        try:
            names: list[str] = next(lines, cast("list[str]", []))
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"{path} names the column {twice[0]!r} twice: rename one of them")
            if len(names) == 1 and (other := next((mark for mark in _NOT_COMMAS if mark in names[0]), None)) is not None:
                raise DataError(
                    f"the first line of {path} is {names[0]!r}, which has {other!r} and no comma: separate cells by commas"
                )
            for cells in lines:
                where = f"{path}:{lines.line_num}"
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise DataError(f"{where} has {len(cells)} cells, and the first line names {len(names)} columns: quote commas")
                yield where, {name: cell or None for name, cell in zip(names, cells, strict=True)}
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{lines.line_num} is not CSV in UTF-8: {error}") from None


_READERS: dict[str, Callable[[Path], Rows]] = {".jsonl": _lines, ".parquet": _parquet, ".csv": _csv}
