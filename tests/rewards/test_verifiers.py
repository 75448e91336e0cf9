"""Verifiers over answers as models write them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tandem.errors import RewardError
from tandem.rewards.child import load
from tandem.types import Json
from tests.rewards.episodes import episode, group, task


def value(name: str, text: str, answer: Json = None, **params: Any) -> float:
    (found,) = load(name, params)(task(answer), group(text, answer=answer))
    return found


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 7", "3 + 4 = <<3+4=7>>7\n#### 7", 1),
        ("The total is $1,234.50.", "1234.5", 1),
        ("so \\boxed{42}, not 43", 42, 1),
        ("It is -3/4", "-0.75", 1),
        ("10-5", "5", 1),
        ("between 1 and -5", "5", 0),
        ("2e-3", "0.002", 1),
        ("8", "7", 0),
        ("none at all", "7", 0),
        ("1/0", "7", 0),
        ("7.", "7", 1),
        ("1e999999999", "7", 0),
        ("\u22125", "-5", 1),
        ("\u22125", "5", 0),
        ("-$5", "5", 0),
        ("1{,}000 or 1\\,000", "1000", 1),
        ("-\\frac{1}{2}", "-0.5", 1),
        ("3\\frac12", "3 1/2", 1),
        ("3 1/2", "0.5", 0),
        ("\\boxed{\\frac{1}{2}}", "2", 0),
        ("\\boxed{\\frac{1}{2}}, not 2", "0.5", 1),
        ("\\boxed{\\frac{x}{2}}", "2", 0),
        ("\\boxed{5\\text{ cm}^2}", "5", 1),
        ("\\boxed{5^\\circ}", "5", 1),
        ("\\boxed{x = 5}", "5", 1),
        ("\\boxed{5 \\text{ or } 6}", "6", 0),
        ("\\boxed{(1,2)}", "2", 0),
        ("7, so \\boxed{}", "7", 0),
        ("3,4,5", "345", 0),
        ("12,34", "1234", 0),
        ("1.000.000", "0", 0),
        ("2^{10}", "10", 0),
        ("5 x 10^3", "3", 0),
        ("2**3", "3", 0),
        ("2\\sqrt{3}", "3", 0),
        ("2\\sqrt{3}", "2", 0),
        ("10:30", "30", 0),
        ("3/4/5", "5", 0),
        ("**42**", "42", 1),
        ("2 or 3", "3", 0),
        ("It is 2 apples, or maybe 3.", "3", 0),
        ("1/2 or 0.5", "0.5", 1),
        ("2 or 3? I say 3", "3", 1),
        ("x = 2 or x = 3", "3", 0),
        ("9" * 5000, "9", 0),
    ],
)
def test_numeric_compares_the_last_number(text: str, answer: Json, expected: float) -> None:
    assert value("numeric", text, answer) == expected


def test_numeric_has_a_tolerance_and_needs_a_number() -> None:
    assert [value("numeric", "3.14", "3.14159", tolerance=tolerance) for tolerance in (0.0, 0.01)] == [0, 1]
    for answer in ("none", "2\\sqrt{3}"):
        with pytest.raises(ValueError, match="has no number to compare with"):
            value("numeric", "1", answer)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("B", "B", 1),
        ("(B)", "B", 1),
        ("The answer is (B), since A is wrong. C too.", "B", 1),
        ("Answer: **B**", "b) B", 1),
        ("A cat. So \\boxed{\\text{C}} and not D", "C", 1),
        ("A cat. So \\boxed{\\text{C}} and not D", "D", 0),
        ("\\boxed{A, B}", "B", 0),
        ("The answer is A because it is", "A", 1),
        ("The answer is not A", "A", 0),
        ("The answer is A or B", "A", 0),
        ("Answer: A, B", "A", 0),
        ("The answer is A? No, B.", "A", 0),
        ("neither A nor B", "B", 0),
        ("It isn't B", "B", 0),
        ("A, B", "B", 0),
        ("A cat sat there", "A", 0),
        ("So I am sure", "I", 0),
        ("A+ and C++", "C", 0),
        ("an F-16", "F", 0),
        ("A cat. So \\boxed{C} and not D", "C", 1),
        ("Both A and B look right; I choose C", "C", 1),
        ("Bananas", "B", 0),
        ("K", "B", 0),
    ],
)
def test_choice_finds_the_letter(text: str, answer: str, expected: float) -> None:
    assert value("choice", text, answer) == expected


def test_choice_needs_an_answer_that_is_a_choice() -> None:
    assert value("choice", "the answer is 2", "2", choices="123") == 1
    with pytest.raises(ValueError, match="'seven', is none of the choices AB"):
        value("choice", "A", "seven", choices="AB")


def test_regex_searches_and_refuses_a_pattern_that_is_none() -> None:
    pattern = r"(?s)^<think>.*</think>\s*<answer>.*</answer>$"
    assert value("regex", "<think>\nhm\n</think>\n<answer>4</answer>", pattern=pattern) == 1
    assert value("regex", "<answer>4</answer>", pattern=pattern) == 0
    with pytest.raises(RewardError, match=r"the pattern '\(' is none: missing \)"):
        value("regex", "a", pattern="(")
    with pytest.raises(RewardError, match="missing a required argument: 'pattern'"):
        load("regex", {})


@pytest.mark.parametrize("name", ["numeric", "choice"])
def test_an_answer_that_was_cut_off_is_not_right(name: str) -> None:
    answer = "4" if name == "numeric" else "A"
    assert load(name, {})(task(answer), [episode(answer, answer=answer, stop="length")]) == [0]


SCHEMA = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "born": {"format": "date"}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "Ada"}', 1),
        ('Here it is:\n```json\n{"name": "Ada"}\n```\n', 1),
        ('{"name": 3}', 0),
        ("{'name': 'Ada'}", 0),
        ("[" * 100_000, 0),
        ('```JSON\n{"name": "Ada"}\n```', 1),
        ('{"name": "Ada", "age": NaN}', 0),
        ('{"name": "Ada", "born": "2020-99-99"}', 0),
    ],
)
def test_json_schema(text: str, expected: float) -> None:
    pytest.importorskip("jsonschema")
    assert value("json_schema", text, schema=SCHEMA) == expected
    assert value("json_schema", text, answer=SCHEMA) == expected


def test_json_schema_refuses_what_is_no_schema_and_fetches_nothing() -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(RewardError, match=r"has no schema: give params\.schema"):
        value("json_schema", "{}", answer="4")
    with pytest.raises(RewardError, match=r"\$\.type of the schema is wrong: 'objekt' is not valid"):
        value("json_schema", "{}", schema={"type": "objekt"})
    with pytest.raises(Exception, match="Unresolvable"):
        value("json_schema", "{}", schema={"$ref": "http://127.0.0.1:1/schema.json"})


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", 1),
        ("$x = 2\\sqrt{2}$", "\\sqrt{8}", 1),
        ("The answer is $(x+1)^2$", "$x^2+2x+1$", 1),
        ("\\boxed{3}", "\\frac{1}{2}", 0),
        ("I do not know", "\\frac{1}{2}", 0),
        ("\\boxed{0.333333}", "\\frac{1}{3}", 1),
        ("\\boxed{0.33333}", "\\frac{1}{3}", 0),
        ("\\boxed{2:3}", "2", 0),
        ("\\boxed{(1,2]}", "(1,2)", 0),
        ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1),
        ("\\boxed{50\\%}", "0.5", 1),
        ("\\boxed{5}", "-5", 0),
        ("2 or 3", "2", 0),
        ("2 or 3", "3", 0),
        ("The answer is 2 or 3", "2", 0),
        ("The answer is 2 or maybe 3.", "3", 0),
        ("x=2 or x=3", "3", 0),
        ("2 apples or 3 apples", "3", 0),
        ("$2$ or $3$", "2", 0),
        ("\\boxed{2 \\text{ or } 3}", "2", 0),
        ("$x = 2$ or $x = 3$", "x = 2, x = 3", 1),
        ("The answer is 1/2 or 0.5", "\\frac{1}{2}", 1),
        ("3 or 2? Then the answer is 2", "2", 1),
        ("The answer is 7, not 3 or 4", "7", 1),
        ("The answer is 2 or 3", "\\frac{1}{2}", 0),
    ],
)
def test_math_compares_formulas(text: str, answer: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert value("math", text, answer) == expected


@pytest.mark.parametrize(("name", "package"), [("math", "math_verify"), ("json_schema", "jsonschema")])
def test_a_missing_package_is_named_with_its_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("tandem.rewards.mathematics", "tandem.rewards.schema"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(RewardError, match=f"'{name}' needs the package '{package}', which is not installed"):
        load(name, {})
