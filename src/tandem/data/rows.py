"""One row of a file as a Task: what the columns mean, and what is wrong with a row that does not fit.

messages               a list of {"role", "content"} (and "tool_calls", "name"; ids of calls are not kept), or
prompt [, completion]  a text or such a list, then the text to imitate
answer | ground_truth  what the reward reads: any JSON
id                     a text or whole number, unique in the file; made from the row's number where there is none
anything else          goes into the task's info under its own name
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

from tandem.errors import DataError
from tandem.types import Json, Message, Role, Task, ToolCall

COLUMNS = ("messages", "prompt", "completion", "answer", "ground_truth", "id")
_ROLES: tuple[Role, ...] = get_args(Role)
_FIELDS = ("role", "content", "tool_calls", "name", "tool_call_id")


def tasks_from_rows(rows: Iterable[tuple[str, Mapping[str, object]]], source: str, columns: Mapping[str, str]) -> tuple[Task, ...]:
    """One task a row, in order.

    rows: where each is ("FILE:LINE"), and the row. columns: {ours: theirs} where the file uses other names.
    Raises DataError with the place of the first row that does not fit or repeats an id.
    """
    if unknown := sorted(columns.keys() - set(COLUMNS)):
        raise DataError(f"columns renames {', '.join(unknown)}; what a file's column can stand for is {', '.join(COLUMNS)}")
    tasks: dict[str, Task] = {}
    places: dict[str, str] = {}
    for number, (where, row) in enumerate(rows):
        task = _task(_renamed(row, columns, where), where, number, source)
        if task.id in tasks:
            raise DataError(f"{where}: the id {task.id!r} is that of {places[task.id]} too: ids must be unique in a dataset")
        tasks[task.id] = task
        places[task.id] = where
    return tuple(tasks.values())


def _renamed(row: Mapping[str, object], columns: Mapping[str, str], where: str) -> dict[str, object]:
    renamed = dict(row)
    for ours, theirs in columns.items():
        if theirs not in renamed:
            raise DataError(f"{where} has no column {theirs!r}, which is to be its {ours}; it has {_listed(row)}")
        renamed[ours] = renamed.pop(theirs)
    return renamed


def _task(row: dict[str, object], where: str, number: int, source: str) -> Task:
    for one, other in (("messages", "prompt"), ("messages", "completion"), ("answer", "ground_truth")):
        if row.get(one) is not None and row.get(other) is not None:
            raise DataError(f"{where} has both {one} and {other}: leave one of them out, or rename it")
    talk = row.pop("messages", None) or row.pop("prompt", None)
    if not talk:
        raise DataError(f"{where} has neither messages nor prompt (it has {_listed(row)}): name the column with `columns`")
    messages = _messages(talk, where)
    completion = row.pop("completion", None)
    if completion is not None:
        messages = (*messages, Message("assistant", _text(completion, f"{where}: completion")))
    answer = row.pop("answer", None)
    truth = row.pop("ground_truth", None)
    identity = row.pop("id", None)
    if isinstance(identity, bool) or not isinstance(identity, (str, int, type(None))):
        raise DataError(f"{where}: id is {identity!r}; it must be a text or a whole number")
    return Task(
        id=f"{source}-{number}" if identity is None else str(identity),
        messages=messages,
        answer=_json(truth if answer is None else answer, f"{where}: answer"),
        source=source,
        info={name: _json(value, f"{where}: {name}") for name, value in row.items()},
    )


def _messages(value: object, where: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message("user", value),)
    if not isinstance(value, list):
        raise DataError(f"{where}: a conversation is a text or a list of messages, not {value!r}")
    return tuple(_message(entry, f"{where}: message {i}") for i, entry in enumerate(cast("list[object]", value)))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {value!r}; it must be an object with role and content")
    entry = cast("Mapping[str, object]", value)
    if entry.get("role") not in _ROLES:
        raise DataError(f"{where} has the role {entry.get('role')!r}; roles are {', '.join(_ROLES)}")
    if unknown := [key for key, field in entry.items() if key not in _FIELDS and field is not None]:
        raise DataError(f"{where} has {', '.join(unknown)}, which would be lost; a message has {', '.join(_FIELDS)}")
    calls = tuple(_call(call, where) for call in cast("list[object]", entry.get("tool_calls") or []))
    content = entry.get("content")
    name = entry.get("name")
    return Message(
        cast("Role", entry["role"]),
        "" if content is None and calls else _text(content, f"{where}: content"),
        calls,
        None if name is None else _text(name, f"{where}: name"),
    )


def _call(value: Any, where: str) -> ToolCall:
    """{"function": {"name", "arguments"}} as in the OpenAI format, or the inner object alone."""
    match value:
        case {"function": {"name": str(name), "arguments": arguments}} | {"name": str(name), "arguments": arguments}:
            return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(_json(arguments, where)))
        case _:
            raise DataError(f"{where} has the tool call {value!r}; it must be an object with name and arguments")


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{what} is {value!r}; it must be a text")
    return value


def _json(value: object, what: str) -> Json:
    match value:
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case list():
            return [_json(item, what) for item in cast("list[object]", value)]
        case dict():
            return {str(key): _json(item, what) for key, item in cast("dict[object, object]", value).items()}
        case _:
            raise DataError(f"{what} holds {value!r} ({type(value).__name__}), which JSON cannot: leave it out or write it as text")


def _listed(row: Mapping[str, object]) -> str:
    return ", ".join(row) or "no column at all"
