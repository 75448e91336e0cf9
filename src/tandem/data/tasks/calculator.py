"""Work out `77*99=` in two turns with a calculator: `<77*99>`, which answers `7623;`, then `7623`.

The calculator itself is an environment in agents/.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from tandem.data.tasks.slips import mistyped
from tandem.types import Message

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True, slots=True)
class Calculator:
    """Two numbers from 10 to 99; the larger comes first where they are subtracted.

    The same pair in another order is in the same split, where the order does not matter.
    """

    name: ClassVar[str] = "calculator"
    characters: ClassVar[str] = "0123456789+-*=<>;?"

    left: int
    symbol: str
    right: int

    @classmethod
    def draw(cls, rng: Random) -> Calculator:
        left, right, symbol = rng.randint(10, 99), rng.randint(10, 99), rng.choice("+-*")
        return cls(max(left, right), symbol, min(left, right)) if symbol == "-" else cls(left, symbol, right)

    @property
    def canonical(self) -> str:
        return f"{max(self.left, self.right)}{self.symbol}{min(self.left, self.right)}"

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.symbol}{self.right}="

    @property
    def answer(self) -> str:
        return str(_OPERATIONS[self.symbol](self.left, self.right))

    def solution(self) -> tuple[Message, ...]:
        call = f"<{self.left}{self.symbol}{self.right}>"
        return (Message("assistant", call), Message("tool", f"{self.answer};"), Message("assistant", self.answer))

    def mistake(self, rng: Random) -> tuple[Message, ...]:
        """The call mistyped and its result copied, or the call dropped and the result guessed."""
        if rng.random() < 0.5:
            return (Message("assistant", mistyped(self.answer, rng)),)
        left = mistyped(str(self.left), rng)
        return Calculator(int(left), self.symbol, self.right).solution()
