"""What runs in a reward worker: loads one function, then judges one group after the other until the other end closes.

Frames on the socket are a length and a pickle. The first is ("ready", "") or ("broken", message); then each group's:
("results", [...]), ("failed", reason) where the function raised, ("broken", message) where it broke its contract.
Imports no torch, so that a worker starts in a moment.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import pickle
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, SupportsFloat, cast

from tandem.errors import RegistryError, RewardError
from tandem.faults import crash_point, take_role
from tandem.registry import resolve
from tandem.rewards.functions import FUNCTIONS
from tandem.rewards.signatures import RewardFunction, adapted
from tandem.types import Episode, Json, RewardResult, Task

HEADER = struct.Struct(">Q")
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "float": ((int, float), "a number"),
    "int": ((int,), "a whole number"),
    "str": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
}

_BETWEEN = {Path(__file__).parent, Path(asyncio.__file__).parent}  # what stands between us and the function

Answer = tuple[Literal["ready", "results", "failed", "broken"], Any]


def serve(fd: int, name: str, params: Mapping[str, Json]) -> None:
    """Runs until the socket `fd` closes, and ends then even in the middle of a group."""
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    take_role("reward")
    groups: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, groups), daemon=True).start()
    with suppress(ConnectionError):  # nobody waits any more
        _judge_groups(connection, groups, name, params)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the reading thread can keep the interpreter from ending in its own way


def _judge_groups(connection: socket.socket, groups: SimpleQueue[bytes], name: str, params: Mapping[str, Json]) -> None:
    try:
        function = load(name, params)
    except RewardError as error:
        _send(connection, ("broken", str(error)))
        return
    crash_point("judge.ready")
    _send(connection, ("ready", ""))
    while True:
        task, group = pickle.loads(groups.get())
        crash_point("judge.before")
        answer = judge(function, name, task, group)
        crash_point("judge.after")
        _send(connection, answer)


def load(name: str, params: Mapping[str, Json]) -> RewardFunction:
    """The function that a short name or a path stands for, as one of (task, group). Raises RewardError for one that is none."""
    try:
        function = resolve(name, FUNCTIONS, kind="reward function")
    except RegistryError as error:
        raise RewardError(str(error)) from None
    if not callable(function):
        raise RewardError(f"reward function {name!r} is {function!r}, which cannot be called: name a function")
    if name in FUNCTIONS:
        _check_params(function, name, params)
    return adapted(function, name, params, built_in=name in FUNCTIONS)


def _check_params(function: Any, name: str, params: Mapping[str, Json]) -> None:
    """Against what a built-in function says of its own."""
    for key, parameter in inspect.signature(function).parameters.items():
        kinds, words = _KINDS.get(str(parameter.annotation), ((), ""))
        value = params.get(key)
        if key in params and kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise RewardError(f"reward {name}: params.{key}={value!r} must be {words}")


def judge(function: RewardFunction, name: str, task: Task, group: Sequence[Episode]) -> Answer:
    try:
        return "results", _results(name, function(task, group), len(group))
    except RewardError as error:
        return "broken", str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 the function is the user's: it fails its own group only
        return "failed", f"the reward function raised {type(error).__name__}: {error}".strip().split("\n")[0] + _where(error)


def results(answer: Answer, count: int) -> Sequence[RewardResult]:
    """What the answer to a group of so many episodes says of them. Raises RewardError where the function broke its contract."""
    kind, content = answer
    if kind == "broken":
        raise RewardError(content)
    return content if kind == "results" else [RewardResult.failed(content, raised=True)] * count


def _where(error: BaseException) -> str:
    """For whoever wrote the function: the last line of its own file, and the one that raised, where that is in another."""
    frames = traceback.extract_tb(error.__traceback__)
    beyond = [frame for frame in frames if Path(frame.filename).parent not in _BETWEEN]
    own = [frame for frame in beyond if frame.filename == beyond[0].filename] or frames
    inside = f", in a call of {frames[-1].filename}:{frames[-1].lineno}" if frames[-1] is not own[-1] else ""
    return f" ({own[-1].filename}:{own[-1].lineno}{inside})"


def _results(name: str, given: object, count: int) -> list[RewardResult]:
    promise = "it must return a list with one number or RewardResult for each episode, in order"
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping, set)):
        raise RewardError(f"reward function {name!r} returned {given!r}; {promise}")
    values = list(cast("Iterable[object]", given))
    if len(values) != count:
        raise RewardError(f"reward function {name!r} returned {len(values)} values for a group of {count} episodes; {promise}")
    return [_result(name, value, promise) for value in values]


def _result(name: str, value: Any, promise: str) -> RewardResult:
    if value is None:
        return RewardResult.failed("the reward function returned None")
    if isinstance(value, RewardResult):
        return RewardResult(  # of plain numbers, whatever the function has put there
            None if value.value is None else float(value.value),
            {str(part): float(number) for part, number in value.components.items()},
            tuple((int(position), float(number)) for position, number in value.token_rewards),
            value.reason,
        )
    if not isinstance(value, SupportsFloat):
        raise RewardError(f"reward function {name!r} returned {value!r} for an episode; {promise}")
    number = float(value)
    return RewardResult(number) if math.isfinite(number) else RewardResult.failed(f"the reward function returned {number}")


def _receive(connection: socket.socket, groups: SimpleQueue[bytes]) -> None:
    """Its own thread, so that a worker that is stuck in a function ends when nobody waits for it any more."""
    try:
        with connection.makefile("rb") as frames:
            while header := frames.read(HEADER.size):
                groups.put(frames.read(*HEADER.unpack(header)))
    finally:
        os._exit(0)  # also where the other end died with an answer unread, which is a connection reset, or within a frame


def _send(connection: socket.socket, answer: Answer) -> None:
    message = pickle.dumps(answer)
    connection.sendall(HEADER.pack(len(message)) + message)
