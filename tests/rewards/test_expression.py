from fractions import Fraction

import pytest

from tandem.rewards.expression import MAX_CHARACTERS, evaluate


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, [7]),
        ("2+3*4", 14, [2, 3, 4]),
        ("(2+3)*4", 20, [2, 3, 4]),
        ("10-3-2", 5, [10, 3, 2]),
        ("8/4/2", 1, [8, 4, 2]),
        (" 1 / 3 ", Fraction(1, 3), [1, 3]),
        ("((2))", 2, [2]),
        ("2-3", -1, [2, 3]),
    ],
)
def test_values_and_numbers(text: str, value: Fraction, numbers: list[int]) -> None:
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize("text", ["", " ", "2+", "-2", "2 3", "(2", "2)", "()", "2**3", "a", "2.5", "1234567890", "²", "2(3)"])
def test_anything_else_is_not_arithmetic(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(text)


def test_division_by_zero_and_length() -> None:
    with pytest.raises(ZeroDivisionError):
        evaluate("1/(2-2)")
    assert evaluate("(" * 49 + "1" + ")" * 49) == (1, [1])
    with pytest.raises(ValueError, match="at most 100 characters"):
        evaluate("1" * (MAX_CHARACTERS + 1))
