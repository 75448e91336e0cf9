"""A built-in reward: whether an answer is JSON that fits a schema, which jsonschema checks. An extra: `verify`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import jsonschema
import referencing
from jsonschema import validators

from tandem.errors import RewardError
from tandem.rewards.functions import judged
from tandem.types import Episode, Json, Task

_FENCED = re.compile(r"```(?:(?i:json))?\s*\n(.*?)```", re.DOTALL)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def json_schema(task: Task, group: Sequence[Episode], *, schema: Json = None) -> list[float]:
    """1 where the last assistant turn is JSON that fits the schema, alone or as the last ```json block of a text.

    schema: for all tasks; without it each task's answer is its schema. Nothing is fetched for a $ref; a `format`
    that jsonschema checks without further packages is checked.
    """
    wanted = task.answer if schema is None else schema
    if not isinstance(wanted, Mapping | bool):
        raise RewardError(f"reward json_schema: task {task.id!r} has no schema: give params.schema, or one as each task's answer")
    kind = cast("Any", validators.validator_for)(wanted, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(wanted)
    except jsonschema.SchemaError as problem:
        raise RewardError(f"reward json_schema: {problem.json_path} of the schema is wrong: {problem.message}") from None
    validator = kind(wanted, registry=cast("Any", referencing).Registry(), format_checker=kind.FORMAT_CHECKER)

    def right(text: str) -> bool:
        blocks = _FENCED.findall(text)
        try:
            return bool(validator.is_valid(json.loads(blocks[-1] if blocks else text, parse_constant=_refuse)))
        except (ValueError, RecursionError):
            return False

    return judged(group, right)
