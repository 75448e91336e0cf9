"""The meta-test: every breaker makes its law's check fail, and the check holds again without it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tandem.errors import TandemError
from tests.laws.breaking import Breaker

MODULES = sorted(path.stem for path in Path(__file__).parent.glob("test_law*.py"))
BREAKERS: list[Breaker] = [breaker for name in MODULES for breaker in importlib.import_module(f"tests.laws.{name}").BREAKERS]
LAWS_WITH_BREAKERS = tuple(range(1, 13))


@pytest.mark.parametrize("breaker", BREAKERS, ids=lambda breaker: f"law{breaker.law:02d}-{breaker.name}")
def test_breaker_is_caught(breaker: Breaker, monkeypatch: pytest.MonkeyPatch) -> None:
    breaker.check()
    holder, name = breaker.place()
    monkeypatch.setattr(holder, name, breaker.replacement)
    with pytest.raises((AssertionError, TandemError)):
        breaker.check()


def test_every_law_has_a_breaker() -> None:
    assert {breaker.law for breaker in BREAKERS} == set(LAWS_WITH_BREAKERS)
