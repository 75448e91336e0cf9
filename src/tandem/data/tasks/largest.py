"""Say which of five numbers is the largest, asked in plain English: `Which is the largest: 37, 82, 15, 60, 44?` -> `82`."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from tandem.types import Message


@dataclass(frozen=True, slots=True)
class Largest:
    """Five different numbers from 10 to 99. The same five in another order are in the same split."""

    name: ClassVar[str] = "largest"
    characters: ClassVar[str] = "Whic stelarg:,?0123456789"

    numbers: tuple[int, ...]

    @classmethod
    def draw(cls, rng: Random) -> Largest:
        return cls(tuple(rng.sample(range(10, 100), 5)))

    @property
    def canonical(self) -> str:
        return ",".join(map(str, sorted(self.numbers)))

    @property
    def prompt(self) -> str:
        return f"Which is the largest: {', '.join(map(str, self.numbers))}?"

    @property
    def answer(self) -> str:
        return str(max(self.numbers))

    def solution(self) -> tuple[Message, ...]:
        return (Message("assistant", self.answer),)

    def mistake(self, rng: Random) -> tuple[Message, ...]:
        return (Message("assistant", str(rng.choice(sorted(self.numbers)[:-1]))),)
