"""Judgements that a repeat might not give again: written down before they are used, and read where a run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tandem.types import Episode, RewardResult


class Journal(Protocol):
    """Keeps judgements, by episode. What `record` was given is durable when it returns."""

    def get(self, key: str) -> RewardResult | None: ...
    def record(self, results: Mapping[str, RewardResult]) -> None: ...


def replayed(journal: Journal | None, group: Sequence[Episode]) -> list[RewardResult] | None:
    """The judgement of a group that is all in the journal."""
    if journal is None:
        return None
    known = [result for episode in group if (result := journal.get(str(episode.key))) is not None]
    return known if len(known) == len(group) else None


def recorded(journal: Journal | None, group: Sequence[Episode], results: Sequence[RewardResult]) -> Sequence[RewardResult]:
    """The same results, now that they are in the journal."""
    if journal is not None:
        journal.record({str(episode.key): result for episode, result in zip(group, results, strict=True)})
    return results
