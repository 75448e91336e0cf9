"""Arithmetic that somebody else wrote, read by a parser of its own: whole numbers, + - * / and parentheses, exactly."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARACTERS = 100  # bounds the depth of the recursion

_TOKEN = re.compile(r"\s*(?:([0-9]{1,9})|([-+*/()]))")


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The value of `text` and the numbers in it, in order.

    Raises ValueError for what is not such an expression (a sign in front of a number is not) and ZeroDivisionError.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters; this one has {len(text)}")
    text = text.rstrip()
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text[position:]!r} is not arithmetic")
        tokens.append(match.group().strip())
        position = match.end()
    parser = _Parser(tokens)
    value = parser.total()
    if parser.rest:
        raise ValueError(f"{parser.rest[-1]!r} is not expected there")
    return value, [int(token) for token in tokens if token.isdigit()]


class _Parser:
    """total = product (("+" | "-") product)*; product = factor (("*" | "/") factor)*; factor = number | "(" total ")"."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens[::-1]

    def total(self) -> Fraction:
        value = self._product()
        while self.rest and self.rest[-1] in "+-":
            value = value + self._product() if self.rest.pop() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self.rest and self.rest[-1] in "*/":
            value = value * self._factor() if self.rest.pop() == "*" else value / self._factor()
        return value

    def _factor(self) -> Fraction:
        token = self.rest.pop() if self.rest else ""
        if token.isdigit():
            return Fraction(int(token))
        if token != "(":
            raise ValueError(f"a number or a parenthesis is expected, not {token!r}")
        value = self.total()
        if not self.rest or self.rest.pop() != ")":
            raise ValueError("a parenthesis is not closed")
        return value
