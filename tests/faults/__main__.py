"""`make faults [KILLS=200] [SEED=0] [ONLY=sync,ranks]`: kills runs of every setting at every point that a role of theirs passes.

Each setting runs once undisturbed, with a trace of the points that its processes pass. Then come runs that are killed one to
three times each and gone on with, at points and passages drawn from the trace: every pair of role and point at least once,
and at random until there are as many kills as were asked for. In half of the runs whose workers die, the run is to go on by
itself; in the others the death ends it. A run that ended before it was killed (what an asynchronous
mode passes depends on timing) is held to its account, and its kill does not count.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.e2e.runs import assert_same
from tests.faults.kills import Run, UnreachedError, of_an_engine
from tests.faults.points import without
from tests.faults.settings import SETTINGS, Setting

_AFTER_A_KILL = tuple(
    f"controller/{point}"
    for point in ("restore.before", "restore.models", "queue.before_restore", "queue.after_restore", "restore.after")
)
"""Passed only by a run that goes on."""


@dataclass
class Campaign:
    """The kills of one setting. passes: how often each ROLE/POINT is passed in an undisturbed run."""

    setting: Setting
    undisturbed: dict[str, Any]
    passes: Counter[str]
    kills: int = 0
    runs: int = 0
    unreached: int = 0
    outlived: int = 0
    killed: set[str] = field(default_factory=set[str])
    failures: list[str] = field(default_factory=list[str])

    @classmethod
    def traced(cls, setting: Setting, directory: Path) -> Campaign:
        trace = directory / "trace"
        undisturbed = Run(setting, directory / "undisturbed").finish(trace)
        passes = Counter(trace.read_text().split())
        return cls(setting, undisturbed, passes + Counter(dict.fromkeys(_AFTER_A_KILL, 1)))

    def plan(self, random: Random, least: int) -> Iterator[list[str]]:
        """Runs as lists of kills: every pair once, in a random order, and then pairs at random."""
        pairs = sorted(self.passes)
        random.shuffle(pairs)
        pairs += random.choices(pairs, k=max(0, least - len(pairs)))
        while pairs:
            some = [pairs.pop() for _ in range(min(len(pairs), random.choice((1, 2, 3))))]
            if some[0] in _AFTER_A_KILL:
                some.insert(0, "controller/log.metrics.after")
            yield [self._at(pair, random) for pair in some]

    def _at(self, pair: str, random: Random) -> str:
        """Early in half of all cases, so that a run which goes on passes the point so often again."""
        return f"{pair}:{random.randint(1, max(1, self.passes[pair] // random.choice((1, 4))))}"

    def run(self, kills: list[str], directory: Path, *, by_itself: bool) -> None:
        """Kills a run at these points, and holds it to its account. by_itself: it goes on where a worker dies that is no engine."""
        self.runs += 1
        run = Run(self.setting, directory)
        of_workers = [at for at in kills if of_an_engine(at) or (by_itself and not at.startswith(("controller/", "reward/")))]
        first = [at for at in kills if at not in of_workers]
        for number, at in enumerate(first):
            try:
                run.kill(at)
            except UnreachedError:
                self.unreached += len(first) - number  # the run is at its end, and has nothing more to pass
                break
            self.kills += 1
            self.killed.add(at.partition(":")[0])
        if of_workers:
            died = run.outlive(of_workers)
            self.kills += len(died)
            self.outlived += len(died)
            self.unreached += len(of_workers) - len(died)
            self.killed.update(at.partition(":")[0] for at in died)
        found = run.finish()
        if run.comparable:
            assert_same(found, self.undisturbed)


def campaign(setting: Setting, directory: Path, random: Random, least: int) -> Campaign:
    """Shows what it does."""
    made = Campaign.traced(setting, directory)
    runs = [(kills, random.random() < 0.5) for kills in made.plan(random, least)]
    print(f"{setting.name}: {len(made.passes)} pairs of role and point; {len(runs)} runs to be killed", flush=True)
    for number, (kills, by_itself) in enumerate(runs, start=1):
        began = time.monotonic()
        try:
            made.run(kills, directory / f"run-{number}", by_itself=by_itself)
            verdict = "fine"
        except Exception:  # noqa: BLE001 whatever went wrong is reported with the kills that led there, and the others go on
            made.failures.append(f"{setting.name}: {' '.join(kills)}{', and went on by itself' if by_itself else ''}")
            traceback.print_exc()
            verdict = "FAILED"
        print(f"{setting.name} {number}/{len(runs)} {verdict} {time.monotonic() - began:.0f} s: {' '.join(kills)}", flush=True)
        shutil.rmtree(directory / f"run-{number}", ignore_errors=True)
    return made


def report(campaigns: list[Campaign], *, whole: bool) -> int:
    """whole: whether all settings ran, which then must pass all points of the code."""
    row = "{:<16} {:>7} {:>7} {:>7} {:>9} {:>7} {:>9} {:>9}".format
    print(row("setting", "pairs", "killed", "kills", "by itself", "runs", "unreached", "failures"))
    for each in campaigns:
        counts = len(each.passes), len(each.killed), each.kills, each.outlived, each.runs, each.unreached, len(each.failures)
        print(row(each.setting.name, *counts))
    for failure in (failure for each in campaigns for failure in each.failures):
        print(f"failed: {failure}")
    unpassed = without({pair.partition("/")[2] for each in campaigns for pair in each.passes}) if whole else set[str]()
    if unpassed:
        print(f"points that no setting passes: {', '.join(sorted(unpassed))}")
    print(f"{sum(each.kills for each in campaigns)} kills, {sum(len(each.failures) for each in campaigns)} failures")
    return 1 if unpassed or any(each.failures for each in campaigns) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults")
    parser.add_argument("--kills", type=int, default=200, help="about so many, and every pair once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"settings, of {', '.join(SETTINGS)}")
    chosen = parser.parse_args()
    names = [name for name in chosen.only.split(",") if name] or list(SETTINGS)
    campaigns: list[Campaign] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="tandem-faults-") as place:
            random = Random(f"{chosen.seed} {name}")
            campaigns.append(campaign(SETTINGS[name], Path(place), random, chosen.kills // len(names)))
    return report(campaigns, whole=len(names) == len(SETTINGS))


if __name__ == "__main__":
    sys.exit(main())
