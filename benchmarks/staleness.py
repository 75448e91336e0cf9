"""What staleness costs in what is learned: the quickstart with samples up to two versions old, against sync, seed by seed.

    python benchmarks/staleness.py   # the last line is JSON; 1 where the bound is above LIMIT

Each seed is trained twice, with `trainer.mode=sync`, and with `separate_async`, staleness 2 and `correction=icepop`, and is
measured on 512 held-out tasks at the end. Both begin from the same warmed-up weights. The bound is that of the mean difference over
the seeds, sync less stale: one-sided, 95%, by Student's t of the five differences.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEEDS, T_95, LIMIT = (0, 1, 2, 3, 4), 2.132, 0.05  # of Student's t with four degrees of freedom
COMMON = ("data.heldout.size=512", "evaluation.tasks=512", "trainer.eval_every=0", "trainer.snapshot_every=0", "logs=[]")
MODES = {
    "sync": ("trainer.mode=sync",),
    "stale": (
        *("trainer.mode=separate_async", "trainer.staleness=2", "algorithm.correction=icepop"),
        *("runtime=process", "runtime.pools={trainer: 1}"),
    ),
}


def trained(seed: int, mode: str, directory: Path) -> dict[str, float]:
    """Held-out pass@1 before and after, and how old samples were."""
    arguments = ["train", str(ROOT / "recipes/quickstart.yaml"), f"seed={seed}", f"run.dir={directory}", *COMMON, *MODES[mode]]
    subprocess.run([sys.executable, "-c", "from tandem.cli import main; main()", *arguments], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {"before": summary["eval_before"]["pass@1"], "after": summary["eval_after"]["pass@1"]}
    for name in ("staleness/mean", "mismatch/ess", "mismatch/k1"):
        found[name] = statistics.mean(line[name] for line in lines if name in line)
    return {name: round(value, 4) for name, value in found.items()}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", type=Path, help="where the last line goes, too")
    given = options.parse_args()
    rows: list[dict[str, object]] = []
    differences: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in SEEDS:
            found = {mode: trained(seed, mode, Path(directory) / f"{mode}-{seed}") for mode in MODES}
            differences.append(found["sync"]["after"] - found["stale"]["after"])
            rows.append({"seed": seed, **found})
            print(rows[-1], file=sys.stderr, flush=True)
    mean = statistics.mean(differences)
    bound = mean + T_95 * statistics.stdev(differences) / len(differences) ** 0.5
    claim = {"difference": round(mean, 4), "bound": round(bound, 4), "limit": LIMIT, "pass": bound <= LIMIT}
    line = json.dumps({"benchmark": "staleness", "seeds": rows} | claim)
    if given.json is not None:
        given.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0 if claim["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
