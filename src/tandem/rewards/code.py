r"""A built-in reward: whether a program does what its tests say, run in a sandbox.

A task's answer is one of
    "assert f(2) == 4\n..."              a test as source: asserts, or HumanEval's `check` with its call
    ["assert f(2) == 4", ...]           several, as MBPP has them
    {"inputs": [...], "outputs": [...]}  texts on standard input, and what the program must print, as in programming contests

The program is the last ```python block of the last assistant turn, or the last block without a language, or all of it. It is a
module of its own, imported by the tests, so that ending early passes none of them, and what it does to stdout, to built-in
functions and to names of `__main__` changes no count. It shares a process with its tests: one that searches the stack for what
checks it, or returns an object that is equal to everything, is not found out.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from tandem.errors import RewardError, SandboxError
from tandem.ports import Limits, Sandbox
from tandem.registry import resolve
from tandem.rewards.functions import answer_of
from tandem.types import Episode, RewardResult, Task

SANDBOXES = {
    "isolated": "tandem.sandbox.isolated:IsolatedSandbox",
    "process": "tandem.sandbox.process:SubprocessSandbox",
}
_AT_ONCE = 4
_FENCED = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_PYTHON = ("python", "python3", "py")
_Checks = tuple[list[str], list[str], list[str]]  # tests, or inputs and outputs
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
_TESTS = """
import json, os

def count():  # what counts has no name that a program could give something else
    tests, word = json.load(open("tests.json"))
    os.remove("tests.json")
    execute, write, leave, out = exec, os.write, os._exit, os.dup(1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    import solution
    names = dict(vars(solution), __name__="__main__")  # of the program and of the tests
    passed = 0
    for test in tests:
        try:
            execute(test, names)
            passed += 1
        except BaseException:
            pass
    write(out, f"{word} {passed}".encode())
    leave(0)  # whatever threads are left

count()
"""


@dataclass(frozen=True)
class _Judge:
    sandbox: Sandbox
    limits: Limits

    async def asserts(self, program: str, tests: Sequence[str]) -> float:
        """The share of the tests that pass."""
        word = secrets.token_hex(8)
        files = {"solution.py": program, "tests.json": json.dumps([list(tests), word]), "main.py": _TESTS}
        outcome = await self.sandbox.run([sys.executable, "main.py"], files, self.limits)
        found = re.fullmatch(rf"{word} (\d+)", outcome.stdout)
        passed = int(found[1]) if found and outcome.limit is None else 0
        return passed / len(tests) if passed <= len(tests) else 0.0

    async def printed(self, program: str, inputs: Sequence[str], outputs: Sequence[str]) -> float:
        """The share of the inputs for which it prints the output, white space at ends of lines aside."""
        passed = 0
        for given, expected in zip(inputs, outputs, strict=True):
            command = ["/bin/sh", "-c", 'exec "$0" solution.py < input.txt', sys.executable]
            outcome = await self.sandbox.run(command, {"solution.py": program, "input.txt": given}, self.limits)
            passed += outcome.exit_code == 0 and _lines(outcome.stdout) == _lines(expected)
        return passed / len(inputs)


def code(
    task: Task,
    group: Sequence[Episode],
    *,
    partial: bool = False,
    sandbox: str = "isolated",
    wall_s: float = 10.0,
    cpu_s: float = 5.0,
    memory_mb: int = 1024,
) -> list[RewardResult]:
    """1 where every test passes; partial: the share of those that do. Component `passed` is that share.

    sandbox: "isolated", or "process", which runs programs with limits and without walls. wall_s, cpu_s, memory_mb: of one run.
    """
    for name, limit in {"wall_s": wall_s, "cpu_s": cpu_s, "memory_mb": memory_mb}.items():
        if not 0 < limit < math.inf:
            raise RewardError(f"reward code: {name}={limit!r} must be a number above 0")
    make = cast("Any", resolve(sandbox, SANDBOXES, kind="sandbox"))
    judge = _Judge(make(), Limits(cpu_s=cpu_s, wall_s=wall_s, memory_bytes=memory_mb << 20))
    checks = _checks(task)
    try:
        shares = asyncio.run(_judged(judge, checks, group)) if group else []
    except SandboxError as problem:
        raise RewardError(f"reward code: {problem}") from None
    return [RewardResult(share if partial else float(share == 1), {"passed": share}) for share in shares]


async def _judged(judge: _Judge, checks: _Checks, group: Sequence[Episode]) -> list[float]:
    tests, inputs, outputs = checks
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(episode: Episode) -> float:
        if episode.stop != "stop":
            return 0.0
        async with places:
            if tests:
                return await judge.asserts(_program(episode.completion), tests)
            return await judge.printed(_program(episode.completion), inputs, outputs)

    return list(await asyncio.gather(*(one(episode) for episode in group)))


def _program(text: str) -> str:
    """The last block of Python, or else the last without a language, or else all of it."""
    blocks = _FENCED.findall(text)
    for wanted in (_PYTHON, ("",)):
        if found := [block for language, block in blocks if language.lower() in wanted]:
            return found[-1]
    return text


def _checks(task: Task) -> _Checks:
    answer = answer_of(task)
    if isinstance(answer, dict):
        both = cast("dict[str, object]", answer)
        found: tuple[object, ...] = ([], both.get("inputs"), both.get("outputs"))
    else:
        found = ([answer] if isinstance(answer, str) else answer, [], [])
    tests, inputs, outputs = (_texts(each) for each in found)
    if tests is None or inputs is None or outputs is None or len(inputs) != len(outputs) or not tests + inputs:
        raise ValueError(f"the answer of task {task.id!r} has no tests: it must be source, a list of it, or inputs and outputs")
    if tests and not any(_runs(test, task) for test in tests):
        raise ValueError(f"the tests of task {task.id!r} define and call nothing, so that every program passes: add the call")
    return tests, inputs, outputs


def _runs(test: str, task: Task) -> bool:
    """Whether it does more than to import and define."""
    try:
        statements = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        raise ValueError(f"a test of task {task.id!r} is not Python: {problem}") from None
    return not all(isinstance(each, _DEFINES) or isinstance(getattr(each, "value", None), ast.Constant) for each in statements)


def _texts(value: object) -> list[str] | None:
    """None where it is no list of texts."""
    texts = cast("list[object]", value) if isinstance(value, list) else [None]
    return cast("list[str]", texts) if all(isinstance(text, str) for text in texts) else None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
