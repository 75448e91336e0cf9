"""`python -m tests.mutants [MODULE ...]`: the fate of every mutant, or of those of some modules; writes docs/mutation.md.

WORKERS in the environment is how many run at once (1). Exits with 1 where fewer than 95 % are killed, or a reason in
equivalent.toml is for a mutant that is killed or no longer made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from tests.mutants import page
from tests.mutants.mutations import Mutant
from tests.mutants.runner import Fate, check, sources


def main(only: Sequence[str]) -> int:
    chosen = sources(only)
    if unknown := sorted({*only} - {source.module for source in chosen}):
        raise SystemExit(f"no module {unknown[0]!r} is mutated; there are {', '.join(source.module for source in sources())}")
    why = page.reasons()
    fates: dict[str, dict[str, Fate]] = {source.module: {} for source in chosen}
    results = page.read() if only else {}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(file=os.fdopen(os.dup(1), "w"), soft_wrap=True)  # pytest runs in this process too
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=sum(len(source.mutants) for source in chosen))

        def tell(mutant: Mutant, fate: Fate) -> None:
            of_module = fates[mutant.module]
            of_module[str(mutant)] = fate
            progress.advance(bar)
            if fate == Fate.SURVIVED and str(mutant) not in why:
                progress.console.print(f"survives: {mutant}", markup=False, highlight=False)
            for source in chosen:
                if source.module == mutant.module and len(of_module) == len(source.mutants):
                    results[source.module] = page.result(source, of_module)
                    page.write(results)

        check(chosen, int(os.environ.get("WORKERS") or 1), tell)
    found = {source.module: results[source.module] for source in chosen if source.mutants}
    survivors = {name for each in found.values() for name in each.survivors}
    stale = [
        name
        for name in why
        if name not in survivors and name.startswith(tuple(f"{module}{end}" for module in found for end in ".:"))
    ]
    for name in stale:
        console.print(f"equivalent.toml explains a mutant that does not survive: {name}", markup=False, highlight=False)
    unexplained = len(survivors - why.keys())
    console.print(f"{100 * page.score(found):.1f} % killed; {len(survivors)} survive, {unexplained} of them without a reason")
    console.file.flush()
    return int(page.score(found) < page.NEEDED or bool(stale))


sys.exit(main(sys.argv[1:]))
