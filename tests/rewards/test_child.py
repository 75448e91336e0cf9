import subprocess
import sys

import pytest

from tandem.errors import RewardError
from tandem.rewards.child import judge, load
from tests.rewards.episodes import group, task

MODULE = "tests.rewards.user_functions"


def test_a_worker_imports_no_torch() -> None:
    code = "import sys, tandem.rewards.child; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_functions_are_found_by_short_name_module_and_file() -> None:
    assert load("exact_match", {})(task(), group("4", "5")) == [1, 0]
    assert load(f"{MODULE}:length", {"per_character": 2})(task(), group("abc")).tolist() == [6]
    assert load("tests/rewards/user_functions.py:length", {})(task(), group("abc")).tolist() == [3]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("exact_mach", "did you mean 'exact_match'"),
        ("no.such.module:f", "no module"),
        (f"{MODULE}:lenght", "did you mean 'length'"),
        (f"{MODULE}:NUMBER", "is 3, which cannot be called: name a function"),
        (
            f"{MODULE}:takes_nothing",
            r"has no argument that says how it is called, \(\): name its arguments \(task, group\), verl's",
        ),
        (f"{MODULE}:hangs_once", "missing a required argument: 'mark'"),
    ],
)
def test_functions_that_cannot_be_used_are_refused(name: str, match: str) -> None:
    with pytest.raises(RewardError, match=match):
        load(name, {})


def test_parameters_that_the_function_does_not_take_are_refused() -> None:
    with pytest.raises(RewardError, match="unexpected keyword argument 'colour'"):
        load(f"{MODULE}:length", {"colour": "red"})


@pytest.mark.parametrize("first", ["short", "none", "text", "string", "number"])
def test_a_broken_contract_says_what_was_returned_and_what_should_be(first: str) -> None:
    kind, message = judge(load(f"{MODULE}:reads", {}), "reads", task(), group(first, "b"))
    assert kind == "broken"
    assert "reward function 'reads' returned" in message
    assert "one number or RewardResult for each episode, in order" in message


def test_numbers_that_are_none_are_failures_with_their_reason() -> None:
    kind, results = judge(load(f"{MODULE}:reads", {}), "reads", task(), group("nan", "b", "c", "d"))
    assert kind == "results"
    assert [result.value for result in results] == [None, None, None, 1.0]
    assert [result.reason for result in results[:3]] == [
        "the reward function returned nan",
        "the reward function returned inf",
        "the reward function returned None",
    ]


@pytest.mark.parametrize(
    ("first", "reason"),
    [("raise", "KeyError: 'missing\\nand more'"), ("exit", "SystemExit: bye"), ("nan result", "NonFiniteError: reward nan")],
)
def test_what_the_function_raises_fails_its_group_in_one_line(first: str, reason: str) -> None:
    kind, message = judge(load(f"{MODULE}:reads", {}), "reads", task(), group(first))
    assert kind == "failed"
    assert message.startswith(f"the reward function raised {reason}")
    assert ".py:" in message
    assert "\n" not in message


def test_results_are_made_of_plain_numbers() -> None:
    kind, (first, second) = judge(load(f"{MODULE}:details", {}), "details", task(), group("a", ""))
    assert kind == "results"
    assert [type(number) for number in (first.value, first.components["style"], *first.token_rewards[0])] == [
        float,
        float,
        int,
        float,
    ]
    assert (second.value, second.reason) == (None, "nothing to judge")
