"""Built-in rewards that compare what an answer says at its end with the task's answer: a number, a choice, a pattern."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from tandem.errors import RewardError
from tandem.rewards.functions import judged, said_of
from tandem.types import Episode, Task

_SIGNS = str.maketrans("−–", "--")
_UNIT = re.compile(r"\^\{?\\circ\}?|°|\\(?:text|textrm|mathrm|mbox)\{[^{}\d]*\}(?:\^\{?\d\}?)?")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[, !]|[\u00a0\u2009\u202f])(?=\d{3})")
_FRACTION = re.compile(r"(?:(\d)\s*)?\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_NUMBER = re.compile(
    r"""
      # No part of something larger.
      (?<!\d[.,/:eE]) (?<!\d\*\*) (?<!\^) (?<!\^[-{]) (?<!\^\{-) (?<!sqrt\{) (?<!\}\{) (?<!√) (?<!0x)
      (?P<sign>(?<![\w)\]}])-\\?\$?)?
      (?>(?:(?P<whole>\d+)\ (?=\d+/\d))?
         (?P<number>(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|/\d+)?|(?<![\d.])\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?))
      (?!\d|[.,/:]\d|\^|\*\*\d|\s?(?:\\(?:pi|sqrt|[dt]?frac)|[π√]))
    | (?P<unread>\d+)
    """,
    re.VERBOSE,
)
_MAX_DIGITS = 200
_OR = re.compile(r"\W*(?:[a-z]+\W+)?or\s+(?:[a-z]+\s+)?(?:[a-z]\s*=\s*)?\W*")  # between two numbers, both of which are said


def numeric(task: Task, group: Sequence[Episode], *, tolerance: float = 0.0) -> list[float]:
    r"""1 where the number of the last assistant turn is that of the task's answer, or differs by no more than `tolerance`.

    Of a text it is the only one in the last \boxed{}, or else the last one: 1,234.50, -3/4, 2e-3, 3 1/2, \frac{1}{2}. An answer
    like "... #### 72" has 72. A part of something larger (of 2^{10}, 3,4,5, 10:30 or 2\sqrt{3}) is no number, and "2 or 3" none.
    """
    if not 0 <= tolerance < math.inf:
        raise RewardError(f"reward numeric: tolerance={tolerance!r} must be a number, and not negative")
    expected = _value(said_of(task))
    if expected is None:
        raise ValueError(f"the answer of task {task.id!r}, {task.answer!r}, has no number to compare with")
    slack = Fraction(tolerance)

    def right(text: str) -> bool:
        value = _value(text)
        return value is not None and abs(value - expected) <= slack

    return judged(group, right)


def choice(task: Task, group: Sequence[Episode], *, choices: str = "ABCDEFGHIJ") -> list[float]:
    r"""1 where the letter that the last assistant turn chooses is that of the task's answer.

    It is the only one in the last \boxed{}, or else the last after the word answer, or else the last that stands alone; one that is
    denied or named beside another ("not A", "A or B") is none.
    """
    if not choices or not choices.isalnum():
        raise RewardError(f"reward choice: choices={choices!r} must be the letters, one after the other, as in ABCD")
    letter = "[" + "".join(map(re.escape, choices)) + "]"
    alone = re.compile(rf"(?<![\w'])(?<!\w-){letter}(?![\w'+])(?!-\w)")
    said = re.compile(rf"(?i:answer)(?:\s+is)?\W{{0,8}}(?P<letter>{alone.pattern})")
    bare = re.compile(rf"(?P<letter>(?![AI]\s+[a-z]){alone.pattern})")  # the words A and I choose nothing
    denied = re.compile(rf"(?:\b(?:not|nor|neither|either|or|and)|n['’]t|{alone.pattern}\W{{0,2}}[,/&])\W{{0,3}}\Z")
    hedged = re.compile(rf"\W{{0,3}}(?:(?:[,/&]|\b(?:or|and|nor)\b)\W{{0,3}}{alone.pattern}|\?)")

    def chosen(text: str) -> str | None:
        if boxes := _boxed(text):
            found = set(alone.findall(boxes[-1]))
            return found.pop() if len(found) == 1 else None
        last = next(iter([*said.finditer(text)][::-1] or [*bare.finditer(text)][::-1]), None)
        if last is None or denied.search(text[: last.start("letter")]) or hedged.match(text[last.end() :]):
            return None
        return last["letter"]

    expected = chosen(said_of(task))
    if expected is None:
        raise ValueError(f"the answer of task {task.id!r}, {task.answer!r}, is none of the choices {choices}")
    return judged(group, lambda text: chosen(text) == expected)


def regex(task: Task, group: Sequence[Episode], *, pattern: str) -> list[float]:
    """1 where the last assistant turn has `pattern` in it, as Python's re.search finds it."""
    del task
    try:
        compiled = re.compile(pattern)
    except re.error as problem:
        raise RewardError(f"reward regex: the pattern {pattern!r} is none: {problem}") from None
    return judged(group, lambda text: compiled.search(text) is not None)


def _boxed(text: str) -> list[str]:
    r"""What stands in each \boxed{} that is closed."""
    found: list[str] = []
    for rest in text.split("\\boxed{")[1:]:
        depth = 1
        for position, character in enumerate(rest):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                found.append(rest[:position])
                break
    return found


def _value(text: str) -> Fraction | None:
    """The number that a text ends with, or that is all that its last box holds."""
    boxes = _boxed(text)
    plain = _THOUSANDS.sub(",", _UNIT.sub(" ", (boxes[-1] if boxes else text).translate(_SIGNS)))
    plain = _FRACTION.sub(_fraction, plain)
    found = [*_NUMBER.finditer(plain)]
    if not found or (boxes and len(found) > 1):
        return None
    beside = len(found) > 1 and _OR.fullmatch(plain[found[-2].end() : found[-1].start()]) is not None
    return _read(found[-1]) if not beside or _read(found[-1]) == _read(found[-2]) else None


def _read(number: re.Match[str]) -> Fraction | None:
    if number["unread"] or len(number[0]) > _MAX_DIGITS:
        return None
    try:
        value = Fraction(number["number"].replace(",", "")) + int(number["whole"] or 0)
    except (ValueError, ZeroDivisionError):
        return None
    return -value if number["sign"] else value


def _fraction(part: re.Match[str]) -> str:
    whole, over, under = part[1], part[2] or part[3], part[4] or part[5]
    return f"{whole} {over}/{under}" if whole else f"{over}/{under}"
