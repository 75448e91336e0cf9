"""The supervised edge around an agent; what it does to a run is in test_source.py."""

from __future__ import annotations

from tandem.trainer.episodes import first_error


def test_the_first_error_is_found_however_deep() -> None:
    inner = ExceptionGroup("inner", [ValueError("first"), KeyError("second")])
    assert str(first_error(ExceptionGroup("outer", [inner, TypeError("third")]))) == "first"
    plain = ValueError("alone")
    assert first_error(plain) is plain
