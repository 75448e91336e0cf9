"""What every Sandbox promises."""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence

import pytest

from tandem.errors import SandboxError
from tandem.ports import Limits, Outcome, Sandbox
from tandem.sandbox.fake import FakeSandbox
from tandem.sandbox.isolated import IsolatedSandbox
from tandem.sandbox.process import SubprocessSandbox

PROGRAMS = {
    "greet": "print(open('data/name.txt').read())",
    "fail": "import sys; sys.exit('no good')",
    "flood": "print('x' * 5000)",
}


def imitated(program: Sequence[str], files: Mapping[str, str]) -> Outcome:
    match next(name for name, source in PROGRAMS.items() if source == files["main.py"]):
        case "greet":
            return Outcome(0, files["data/name.txt"] + "\n", "")
        case "fail":
            return Outcome(1, "", "no good\n")
        case _:
            return Outcome(0, "x" * 5000 + "\n", "")


SANDBOXES: dict[str, Callable[[], Sandbox]] = {
    "fake": lambda: FakeSandbox(imitated),
    "process": SubprocessSandbox,
    "isolated": IsolatedSandbox,
}


@pytest.fixture(params=SANDBOXES)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return SANDBOXES[request.param]()


def run(sandbox: Sandbox, name: str, **files: str) -> Outcome:
    files = {"main.py": PROGRAMS[name], "data/name.txt": "Ada"} | files
    try:
        return asyncio.run(sandbox.run([sys.executable, "main.py"], files, Limits(output_bytes=1000)))
    except SandboxError as error:
        pytest.skip(str(error))


def test_a_program_runs_with_its_files(sandbox: Sandbox) -> None:
    assert run(sandbox, "greet") == Outcome(0, "Ada\n", "")


def test_a_program_that_fails_is_an_outcome_and_no_error(sandbox: Sandbox) -> None:
    assert run(sandbox, "fail") == Outcome(1, "", "no good\n")


def test_output_beyond_its_limit_is_cut_and_named(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "flood")
    assert (outcome.stdout, outcome.limit) == ("x" * 1000, "output")
