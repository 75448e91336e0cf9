"""Reach a target with three or four numbers: `3 12 4=36:`, answered by `(12-3)*4`, say; any right expression counts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from tandem.data.tasks.slips import mistyped
from tandem.types import Json, Message

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True, slots=True)
class Countdown:
    """Numbers from 1 to 20, each to be used once, and a target from 1 to 99 that `expression` reaches.

    The same numbers in another order with the same target are in the same split.
    """

    name: ClassVar[str] = "countdown"
    characters: ClassVar[str] = "0123456789 +-*/()=:?"

    numbers: tuple[int, ...]
    target: int
    expression: str

    @classmethod
    def draw(cls, rng: Random) -> Countdown:
        """Combines the numbers pair by pair until one is left, and starts again where the result is no target."""
        while True:
            numbers = tuple(rng.randint(1, 20) for _ in range(rng.choice((3, 4))))
            parts = [(number, str(number)) for number in numbers]
            while len(parts) > 1:
                rng.shuffle(parts)
                (left, left_text), (right, right_text) = parts.pop(), parts.pop()
                symbol = rng.choice("+-*")
                parts.append((_OPERATIONS[symbol](left, right), f"({left_text}{symbol}{right_text})"))
            target, expression = parts[0]
            if 1 <= target <= 99:
                return cls(numbers, target, expression[1:-1])

    @property
    def canonical(self) -> str:
        return f"{sorted(self.numbers)}={self.target}"

    @property
    def prompt(self) -> str:
        return f"{' '.join(map(str, self.numbers))}={self.target}:"

    @property
    def answer(self) -> Json:
        """What the verifier reads: the numbers, the target, and that all the numbers are to be used."""
        return {"numbers": list(self.numbers), "target": self.target, "use": "all"}

    def solution(self) -> tuple[Message, ...]:
        return (Message("assistant", self.expression),)

    def mistake(self, rng: Random) -> tuple[Message, ...]:
        return (Message("assistant", mistyped(self.expression, rng)),)
