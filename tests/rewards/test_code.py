"""Programs as models write them, judged by tests as data sets have them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import RewardError, SandboxError
from tandem.ports import Limits
from tandem.rewards.code import code
from tandem.types import Json, RewardResult
from tests.rewards.episodes import episode, task

SQUARE = "def square(x):\n    return x * x\n"
TESTS: list[Json] = ["assert square(2) == 4", "assert square(-3) == 9", "assert square(0) == 0"]
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(5) == 25\n\ncheck(square)\n"


def judged(answer: Json, *texts: str, **params: Any) -> list[RewardResult]:
    """With limits and without walls, which every machine has."""
    group = [episode(text, answer=answer, member=i) for i, text in enumerate(texts)]
    return code(task(answer), group, sandbox="process", **params)


@pytest.mark.parametrize("answer", [CHECK, TESTS], ids=["HumanEval", "MBPP"])
def test_programs_in_a_block_or_alone_are_run_against_tests(answer: Json) -> None:
    fenced = f"Here it is:\n```python\n{SQUARE}```\nIt squares."
    wrong = "def square(x):\n    return x + x\n"
    assert [result.value for result in judged(answer, SQUARE, fenced, wrong, "I do not know", "")] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("fence", ["```python\r\n", "```Python\n", "```python3\n", '``` py title="a"\n', "```\n"])
def test_the_last_block_of_python_is_the_program(fence: str) -> None:
    output = "" if fence == "```\n" else "\nIt prints\n```\n4\n```\n```text\nsquare = 4\n```"
    assert [result.value for result in judged(TESTS, f"```python\n1 / 0\n```\n{fence}{SQUARE}```{output}")] == [float("y" in fence)]
    assert [result.value for result in judged(TESTS, f"```text\n4\n```\n{fence}{SQUARE}```{output}")] == [1]


def test_a_program_cannot_raise_the_count_by_its_name() -> None:
    found = "import __main__, builtins\nbuiltins.exec = print\ndef square(x):\n    __main__.passed = 99\n    return 5\n"
    assert [result.value for result in judged(TESTS, found, partial=True)] == [0]


WRONG = "def square(x):\n    return 5\n"
FORGERIES = {
    "the count, where it is made": f"{WRONG}import __main__\n__main__.passed = 3\n",
    "the count, while it is made": "import __main__\ndef square(x):\n    __main__.passed = 3\n    return 5\n",
    "the line that says it": f"import __main__, os\nprint(__main__.word, 3, flush=True)\nos._exit(0)\n{WRONG}",
    "a line like it": f"{WRONG}import os\nfor fd in range(16):\n    try: os.write(fd, b'3')\n    except OSError: pass\n",
    "what runs tests": f"{WRONG}import builtins, os\nbuiltins.exec = lambda *_: None\nos.remove = print\n",
    "what a failure is": f"{WRONG}import builtins\nbuiltins.AssertionError = builtins.BaseException = ArithmeticError\n",
    "how it is written": f"{WRONG}import os\nwrite = os.write\nos.write = lambda fd, said: write(fd, said[:-1] + b'3')\n",
    "the end": f"{WRONG}import atexit, os\natexit.register(lambda: os.write(1, b'3'))\nos._exit = print\n",
    "the tests": f"{WRONG}import glob\nfor name in glob.glob('*'):\n    open(name, 'w').write('[[], 0]')\n",
    "an exception of its own": "def square(x):\n    raise SystemExit(0)\n",
    "a process of its own": f"{WRONG}import os\nif os.fork():\n    os._exit(0)\n",
}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES.keys())
def test_what_a_program_puts_in_the_place_of_others_passes_nothing(program: str) -> None:
    assert [result.components["passed"] for result in judged(TESTS, program)] == [0]


@pytest.mark.parametrize(
    "more",
    [
        "import sys, io\nsys.stdout = io.StringIO()",
        "import sys\nsys.stdout.close()",
        "import os\nos.close(1)",
        "print('x' * 3_000_000)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "import atexit\natexit.register(print, 'bye')",
        "import os\nif os.fork() == 0:\n    os._exit(1)",
    ],
)
def test_what_a_right_program_does_beside_passes(more: str) -> None:
    assert [result.value for result in judged(TESTS, f"{more}\n{SQUARE}", wall_s=5.0)] == [1]


def test_the_share_that_passes_is_a_component_and_partial_credit() -> None:
    (result,) = judged(TESTS, "def square(x):\n    return 2 * x\n")
    assert result == RewardResult(0.0, {"passed": 2 / 3})
    (result,) = judged(TESTS, "def square(x):\n    return 2 * x\n", partial=True)
    assert result.value == 2 / 3


def test_ending_early_passes_nothing() -> None:
    early = [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def square(x):\n    import sys\n    sys.exit(0)",
    ]
    assert [result.value for result in judged(CHECK, *early)] == [0] * 4


def test_a_loop_costs_its_own_answer_alone() -> None:
    results = judged(TESTS, "def square(x):\n    while True: pass\n", SQUARE, wall_s=3.0)
    assert [result.value for result in results] == [0, 1]


def test_what_is_printed_is_compared_line_by_line() -> None:
    answer: Json = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    good = "a, b = map(int, input().split())\nprint(a + b, '')\n"
    assert [result.components["passed"] for result in judged(answer, good, "print(3)", "print(3); exit(1)")] == [1, 0.5, 0]


def test_names_of_the_program_and_of_the_tests_are_not_those_of_what_counts() -> None:
    program = f"tests = []\nword = print = passed = None\n{SQUARE}\ndef _cube(x): return x * square(x)\n"
    assert [result.value for result in judged(["passed = 9\nassert square(2) == 4", "assert _cube(2) == 8"], program)] == [1]
    assert [result.value for result in judged(["passed = 9\nassert square(2) == 5"], program, partial=True)] == [0]


UNCALLED = 'METADATA = {}\n"""Of HumanEval."""\nimport math\ndef check(candidate):\n    assert candidate(2) == 4\n'


@pytest.mark.parametrize("answer", ["", "# none", UNCALLED, ["import math", "x = 3"]])
def test_tests_that_every_program_passes_are_refused(answer: Json) -> None:
    with pytest.raises(ValueError, match="define and call nothing"):
        judged(answer, SQUARE)


def test_tests_that_are_not_python_are_refused() -> None:
    with pytest.raises(ValueError, match="a test of task 't' is not Python"):
        judged(["assert square(2) =="], SQUARE)


@pytest.mark.parametrize("answer", [None, 3, [], [1], {"inputs": ["a"], "outputs": []}, {"tests": "x"}])
def test_an_answer_without_tests_is_refused(answer: Json) -> None:
    with pytest.raises(ValueError, match=r"no answer to compare with|has no tests"):
        judged(answer, SQUARE)


def test_an_answer_that_was_cut_off_is_not_run() -> None:
    assert code(task(CHECK), [episode(SQUARE, answer=CHECK, stop="length")], sandbox="process")[0].value == 0


class NoSandbox:
    """Of a machine that gives none."""

    async def run(self, program: object, files: object, limits: Limits) -> None:
        raise SandboxError("this machine gives no sandbox")


def test_without_walls_nothing_is_judged_unless_it_is_told() -> None:
    with pytest.raises(RewardError, match="reward code: this machine gives no sandbox"):
        code(task(CHECK), [episode(SQUARE, answer=CHECK)], sandbox="tests.rewards.test_code:NoSandbox")


def test_in_walls() -> None:
    try:
        results = code(task(CHECK), [episode(text, answer=CHECK) for text in (SQUARE, "import os\nprint(os.getcwd())\n")])
    except RewardError as error:
        pytest.skip(str(error))
    assert [result.value for result in results] == [1, 0]
