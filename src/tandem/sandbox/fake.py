"""A sandbox that runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tandem.ports import Limits, Outcome


class FakeSandbox:
    """Implements the Sandbox port with a rule from a program and its files to an outcome; `runs` holds the programs.

    Output beyond its limit is cut, as everywhere.
    """

    def __init__(self, rule: Callable[[Sequence[str], Mapping[str, str]], Outcome]) -> None:
        self._rule = rule
        self.runs: list[tuple[str, ...]] = []

    async def run(self, program: Sequence[str], files: Mapping[str, str], limits: Limits) -> Outcome:
        self.runs.append(tuple(program))
        outcome = self._rule(program, files)
        most = limits.output_bytes
        if len(outcome.stdout) <= most and len(outcome.stderr) <= most:
            return outcome
        return replace(outcome, exit_code=None, stdout=outcome.stdout[:most], stderr=outcome.stderr[:most], limit="output")
