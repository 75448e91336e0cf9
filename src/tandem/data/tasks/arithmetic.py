"""Add two numbers: `34+8=`, answered by `42`."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from tandem.data.tasks.slips import mistyped
from tandem.types import Message


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Two numbers from 0 to 99. The same pair in another order is in the same split."""

    name: ClassVar[str] = "arithmetic"
    characters: ClassVar[str] = "0123456789+=?"

    left: int
    right: int

    @classmethod
    def draw(cls, rng: Random) -> Arithmetic:
        return cls(rng.randrange(100), rng.randrange(100))

    @property
    def canonical(self) -> str:
        return f"{min(self.left, self.right)}+{max(self.left, self.right)}"

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    def solution(self) -> tuple[Message, ...]:
        return (Message("assistant", self.answer),)

    def mistake(self, rng: Random) -> tuple[Message, ...]:
        return (Message("assistant", mistyped(self.answer, rng)),)
