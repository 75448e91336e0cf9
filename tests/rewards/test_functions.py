import pytest

from tandem.registry import resolve
from tandem.rewards.functions import FUNCTIONS, arithmetic, countdown, environment, exact_match, number
from tandem.types import Json
from tests.rewards.episodes import episode, group, task

EXTRAS = {"math": "math_verify", "json_schema": "jsonschema", "reasoning_gym": "reasoning_gym"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_table_names_functions(name: str) -> None:
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    assert callable(resolve(name, FUNCTIONS))


@pytest.mark.parametrize(("answer", "right"), [("4", "4"), (4, " 4\n"), ("a b", "a b")])
def test_exact_match_compares_texts(answer: Json, right: str) -> None:
    assert exact_match(task(answer), group(right, "5", "", f"{answer}.")) == [1, 0, 0, 0]


def test_an_answer_that_was_cut_off_is_none() -> None:
    cut = tuple(episode("4", stop=stop) for stop in ("length", "abort", "tool_limit", "error"))
    assert exact_match(task(), cut) == arithmetic(task(), cut) == [0, 0, 0, 0]


def test_an_episode_is_judged_by_its_last_turn() -> None:
    assert exact_match(task("7623"), group("<77*99>")) == [0]


def test_arithmetic_compares_numbers() -> None:
    assert arithmetic(task("-4"), group("-4", "-04", "4", "--4", "-4.", "", "-4 -4", "9" * 5000)) == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("use", "text", "value"),
    [
        ("all", "(12-3)*4", 1),
        ("all", " 4 * (12 - 3) ", 1),
        ("all", "12*3", 0),  # 4 is left over
        ("some", "12*3", 1),
        ("all", "(12-3)*4+0", 0),  # 0 is not given
        ("some", "12+12+12", 0),  # twice more than given
        ("all", "12*4-3*4", 0),
        ("all", "12+3+4", 0),
        ("all", "36", 0),
        ("all", "(12-3)*4=36", 0),
        ("all", "12/(3-3)", 0),
        ("all", "", 0),
        ("all", "__import__('os')", 0),
        ("all", "(" * 5000, 0),
    ],
)
def test_countdown_uses_the_given_numbers(use: str, text: str, value: float) -> None:
    answer: Json = {"numbers": [3, 12, 4], "target": 36, "use": use}
    assert countdown(task(answer), group(text, answer=answer)) == [value]


def test_a_number_is_graded_by_what_it_says_and_where_it_ends() -> None:
    ended = ("82", " 82\n", "It is 82.", "82 or 15", "Not 15 but 82", "none", "", "15", "-82")
    assert number(task("82"), group(*ended)) == [1, 1, 1, 0, 1, 0, 0, 0, 0]
    cut = tuple(episode(text, stop="length") for text in ("82", "It is 82, the", "It is 15"))
    assert number(task("82"), cut) == [0.7, 0.7, 0]


def test_environment_adds_up_what_was_given() -> None:
    assert environment(task(None), [episode("", env_rewards=(0.25, 1.0)), episode("")]) == [1.25, 0]


def test_a_task_without_an_answer_cannot_be_compared() -> None:
    for function in (exact_match, arithmetic, countdown, number):
        with pytest.raises(ValueError, match="task 't' has no answer"):
            function(task(None), group("4"))
