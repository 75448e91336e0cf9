"""The list of keys that a recipe may set is frozen: a new key needs a line in config_leaves.txt, and a reason in review."""

from __future__ import annotations

from pathlib import Path

from tandem.config import leaves
from tandem.recipe import Recipe


def test_no_key_comes_or_goes_unseen() -> None:
    listed = (Path(__file__).parent / "config_leaves.txt").read_text(encoding="utf-8").split()
    known = leaves(Recipe)
    assert [leaf for leaf in known if leaf not in listed] == [], "new: add to config_leaves.txt"
    assert [leaf for leaf in listed if leaf not in known] == [], "gone: remove from config_leaves.txt"
