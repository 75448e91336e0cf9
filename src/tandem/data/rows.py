"""One row of a file as a Task: what the columns mean, and what is wrong with a row that does not fit.

messages               a list of {"role", "content"} (and "tool_calls", "name"; ids of calls are not kept), or
prompt [, completion]  a text or such a list, then the text or the list to imitate
chosen, rejected       two responses, the better one first: texts or lists of messages that follow messages or prompt, or
                       two whole conversations that begin alike
answer | ground_truth  what the reward reads: any JSON
id                     a text or whole number, unique in the file; made from the row's number where there is none
data_source            a text: the task's source, in place of the file's name
anything else          goes into the task's info under its own name

verl's layout is read as it is: its answer is reward_model.ground_truth, and what else is in reward_model stays in the info,
as extra_info does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

from tandem.errors import DataError
from tandem.types import Json, Message, Role, Task, ToolCall

COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "answer", "ground_truth", "id", "data_source")
_ROLES: tuple[Role, ...] = get_args(Role)
_LIST_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content)['"]""")
_NAMED = "name the column that holds it: columns={prompt: question} in a recipe, --column prompt=question of `tandem data check`"
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
        try:
            task = _task(_renamed(row, columns, where), where, number, source)
        except RecursionError:
            raise DataError(f"{where} is nested too deeply: make its lists and objects flatter") from None
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
    _check_verls(row, where)
    _take_out_verls_answer(row, where)
    for one, other in (("messages", "prompt"), ("messages", "completion"), ("completion", "chosen"), ("answer", "ground_truth")):
        if row.get(one) is not None and row.get(other) is not None:
            raise DataError(f"{where} has both {one} and {other}: leave one of them out, or rename it")
    listed, empty = _listed(row), [name for name in ("messages", "prompt") if name in row]
    talk = row.pop("messages", None) or row.pop("prompt", None)
    messages = _messages(talk, where) if talk else ()
    nulls = [name for name in ("chosen", "rejected") if name in row and row[name] is None]
    sides = {name: row.pop(name, None) for name in ("chosen", "rejected")}
    if lacking := [name for name, value in sides.items() if value is None]:
        if len(lacking) == 1 and nulls:
            raise DataError(f"{where}: {nulls[0]} is null, and a pair needs both responses: leave the pair out")
        if len(lacking) == 1:
            raise DataError(f"{where} lacks {lacking[0]} of its pair (it has {listed}): {_NAMED}")
        better: tuple[Message, ...] = ()
        worse: tuple[Message, ...] = ()
    else:
        messages, better, worse = _pair(messages, sides["chosen"], sides["rejected"], where)
    if not messages and empty:
        raise DataError(f"{where}: {empty[0]} is empty, so that there is nothing to ask: leave the row out")
    if not messages:
        raise DataError(f"{where} has neither messages nor prompt (it has {listed}): {_NAMED}")
    completion = row.pop("completion", None)
    if completion is not None:
        messages = (*messages, *_response(messages, completion, f"{where}: completion"))
    answer = row.pop("answer", None)
    truth = row.pop("ground_truth", None)
    identity, origin = row.pop("id", None), row.pop("data_source", None)
    if isinstance(identity, bool) or not isinstance(identity, (str, int, type(None))):
        raise DataError(f"{where}: id is {identity!r}; it must be a text or a whole number")
    return Task(
        id=f"{source}-{number}" if identity is None else str(identity),
        messages=messages,
        answer=_json(truth if answer is None else answer, f"{where}: answer"),
        source=source if origin is None else _text(origin, f"{where}: data_source"),
        info={name: _json(value, f"{where}: {name}") for name, value in row.items()},
        chosen=better,
        rejected=worse,
        chat=isinstance(talk, list),
    )


def _check_verls(row: Mapping[str, object], where: str) -> None:
    """Raises DataError where data_source and reward_model say that a row is verl's, and a part of its layout is missing."""
    model = row.get("reward_model")
    if model is None or row.get("data_source") is None:
        return
    inside = cast("Mapping[str, object]", model) if isinstance(model, Mapping) else dict[str, object]()
    there = {
        "prompt": "prompt" in row or "messages" in row,
        "reward_model.ground_truth": "ground_truth" in inside or "answer" in row or "ground_truth" in row,
    }
    if lacking := [name for name, found in there.items() if not found]:
        holds = f"whose reward_model has {_listed(inside)}" if inside == model else f"whose reward_model is {model!r} and no object"
        raise DataError(
            f"{where} is of verl's layout (data_source, prompt, reward_model.ground_truth) and lacks {' and '.join(lacking)}; it "
            f"has {_listed(row)}, {holds}: add what is missing, or {_NAMED}"
        )


def _take_out_verls_answer(row: dict[str, object], where: str) -> None:
    """{"reward_model": {"ground_truth": ..., more}} becomes {"ground_truth": ..., "reward_model": {more}}."""
    model = row.get("reward_model")
    if not isinstance(model, Mapping) or "ground_truth" not in model:
        return
    if own := [name for name in ("answer", "ground_truth") if row.get(name) is not None]:
        raise DataError(f"{where} has both {own[0]} and reward_model.ground_truth: leave one of them out, or rename it")
    rest = dict(cast("Mapping[str, object]", model))
    row["ground_truth"], row["reward_model"] = rest.pop("ground_truth"), rest


def _pair(
    prompt: tuple[Message, ...], chosen: object, rejected: object, where: str
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """The prompt, and the two responses to it; without a prompt it is what two whole conversations have in common."""
    sides = {"chosen": chosen, "rejected": rejected}
    if not prompt and (texts := [name for name, value in sides.items() if isinstance(value, str)]):
        raise DataError(
            f"{where}: {texts[0]} is a text, and there is no prompt that it answers: add the prompt, or give two whole "
            f"conversations as lists of messages"
        )
    better, worse = (_response(prompt, value, f"{where}: {name}") for name, value in sides.items())
    if not prompt:
        common = next((i for i, (a, b) in enumerate(zip(better, worse, strict=False)) if a != b), min(len(better), len(worse)))
        prompt, better, worse = better[:common], better[common:], worse[common:]
    if better == worse:
        raise DataError(f"{where}: chosen and rejected are the same, so neither is better: leave the pair out")
    for name, response in (("chosen", better), ("rejected", worse)):
        if not prompt or not response or response[0].role != "assistant":
            on = repr(response[0].content) if response else "nothing"
            raise DataError(
                f"{where}: the prompts of chosen and rejected differ: after {len(prompt)} messages that they share, {name} goes on "
                f"with {on}; a pair is two responses to one prompt"
            )
    return prompt, better, worse


def _response(prompt: tuple[Message, ...], value: object, where: str) -> tuple[Message, ...]:
    """What follows the prompt, where there is one; a list may repeat it."""
    if isinstance(value, str):
        return (Message("assistant", _text(value, where)),)
    messages = _messages(value, where)
    if not prompt or (messages and messages[0].role == "assistant"):
        return messages
    if not any(message.role == "assistant" for message in messages):
        raise DataError(f"{where} holds no response: a list of messages needs an assistant turn")
    if messages[: len(prompt)] != prompt:
        raise DataError(f"{where} is a conversation with another prompt than the row's own: a pair is two responses to one prompt")
    return messages[len(prompt) :]


def _messages(value: object, where: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        if _LIST_AS_TEXT.match(value):
            raise DataError(
                f"{where}: a list of messages is written as one text: use JSON lines or parquet, where it can be a list"
            )
        return (Message("user", _text(value, where)),)
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
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        half = ascii(value[problem.start])
        raise DataError(f"{what} has half a character, {half}, which is no text: write the file again in UTF-8") from None
    return value


def _json(value: object, what: str) -> Json:
    match value:
        case str():
            return _text(value, what)
        case None | bool() | int():
            return value
        case float() if math.isfinite(value):
            return value
        case list():
            return [_json(item, what) for item in cast("list[object]", value)]
        case dict():
            return {_text(str(key), what): _json(item, what) for key, item in cast("dict[object, object]", value).items()}
        case _:
            raise DataError(f"{what} holds {value!r} ({type(value).__name__}), which JSON cannot: leave it out or write it as text")


def _listed(row: Mapping[str, object]) -> str:
    return ", ".join(row) or "no column at all"
