"""Sort six digits: `531940=`, answered by `013459`."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from tandem.data.tasks.slips import mistyped
from tandem.types import Message


@dataclass(frozen=True, slots=True)
class Sorting:
    """Six digits, repeats allowed. The same digits in another order are in the same split."""

    name: ClassVar[str] = "sorting"
    characters: ClassVar[str] = "0123456789=?"

    digits: str

    @classmethod
    def draw(cls, rng: Random) -> Sorting:
        return cls("".join(rng.choices("0123456789", k=6)))

    @property
    def canonical(self) -> str:
        return self.answer

    @property
    def prompt(self) -> str:
        return f"{self.digits}="

    @property
    def answer(self) -> str:
        return "".join(sorted(self.digits))

    def solution(self) -> tuple[Message, ...]:
        return (Message("assistant", self.answer),)

    def mistake(self, rng: Random) -> tuple[Message, ...]:
        return (Message("assistant", mistyped(self.answer, rng)),)
