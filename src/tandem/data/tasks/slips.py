"""How a demonstration goes wrong in small ways."""

from __future__ import annotations

from random import Random


def mistyped(text: str, rng: Random) -> str:
    """`text` with one of its digits replaced by another."""
    place = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    wrong = rng.choice([digit for digit in "0123456789" if digit != text[place]])
    return text[:place] + wrong + text[place + 1 :]
