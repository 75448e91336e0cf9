"""The three trainer modes against each other: samples a second of one workload through the whole loop, on two cores.

    python benchmarks/modes.py                          # all cases in 5 rounds; the last line is JSON; 1 where a floor is missed
    python benchmarks/modes.py --rounds 1 --updates 3   # the same in short, while developing
    python benchmarks/modes.py --case colocate_async    # one case alone, in this process

A decoder of 1.2 million parameters; 16 groups of 8 samples an update, whose lengths are forced to be log-normal (median 24,
sigma 1, at most 256) and follow from their keys, so that every case does the same work; native engine, GRPO whose old logprobs
are the engine's (`bypass`). Asynchronous cases have staleness 2 and take groups in strict order of admission. `sync` is given one
thread, two threads, and two data-parallel processes, which sample and train half of the groups each and average their gradients.
With latency, each group waits for its reward: 0.3 s, log-normal (sigma 1, the slowest of 8, at most 3 s), without a processor.
Cases take turns, each in a process of its own; updates that begin a run are not measured. A ratio is that of samples a second
within a round, and its median over the rounds counts. CPU-s are of one update: `here` those of the process that generates, and
trains where nothing else does, `below` those of the trainer's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch.distributed as dist
from lines import machine, row

import tandem.assemble.workers
from tandem.assemble.model import build_model
from tandem.assemble.phases import main_phase
from tandem.assemble.rollout import Rollout
from tandem.ports import LLM
from tandem.recipe import (
    AlgorithmSection,
    DataSection,
    DatasetSection,
    ModelSection,
    Recipe,
    RunSection,
    ShapeSection,
    TrainerSection,
)
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.session import Session
from tandem.runtime.placement import RuntimeConfig
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer import loop
from tandem.trainer.schedule import Mode
from tandem.trainer.source import RolloutConfig
from tandem.types import Episode, Json, Key, Metrics, PolicyRef, RewardResult, SamplingParams, Task

GROUPS, SIZE, PROMPT, LONGEST, WARM = 16, 8, 6, 256, 3
LATENCY_S, SLOWEST_S, SEED = 0.3, 3.0, 7


@dataclass(frozen=True)
class Case:
    """threads: of one operation. ranks: data-parallel processes. latency: whether rewards take time."""

    mode: Mode
    threads: int = 1
    ranks: int = 1
    latency: bool = False


CASES = {
    "sync": Case("sync"),
    "sync_2_threads": Case("sync", threads=2),
    "sync_2_processes": Case("sync", ranks=2),
    "separate_async": Case("separate_async"),
    "colocate_async": Case("colocate_async"),
    "sync_latency": Case("sync", latency=True),
    "separate_async_latency": Case("separate_async", latency=True),
    "colocate_async_latency": Case("colocate_async", latency=True),
}
BEST_SYNC = ("sync", "sync_2_threads", "sync_2_processes")


@dataclass(frozen=True)
class Claim:
    """The samples a second of `case` over those of the best of `against`. stretch: what a rough prototype reached."""

    mode: str
    name: str
    case: str
    against: tuple[str, ...]
    floor: float
    stretch: float


CLAIMS = (
    Claim("separate_async", "one_thread", "separate_async", ("sync",), 1.4, 1.65),
    Claim("separate_async", "best_sync", "separate_async", BEST_SYNC, 1.1, 1.35),
    Claim("separate_async", "latency_strict", "separate_async_latency", ("sync_latency",), 1.7, 2.4),
    Claim("colocate_async", "no_latency", "colocate_async", ("sync",), 0.9, 1.0),
    Claim("colocate_async", "latency_strict", "colocate_async_latency", ("sync_latency",), 1.5, 1.8),
)


# ------------------------------------------------------------------------------------------------- the workload


def random(ordinal: int, *more: int) -> np.random.Generator:
    return np.random.default_rng([SEED, ordinal, *more])


@dataclass(frozen=True)
class ForcedLengths:
    """Implements ports.AgentLoop: as many tokens as the key says. of: the groups are those of rank `of[0]` of `of[1]`."""

    of: tuple[int, int]

    async def __call__(self, task: Task, llm: LLM, key: Key) -> Episode:
        ordinal = key.ordinal * self.of[1] + self.of[0]
        prompt = random(ordinal).integers(0, 10, PROMPT).tolist()
        length = round(float(np.clip(24 * np.exp(random(ordinal, key.member).standard_normal()), 1, LONGEST)))
        _, stop = await llm.complete(prompt, SamplingParams(max_tokens=length))
        return Episode(key, task, llm.samples(), task.messages, stop)


@dataclass(frozen=True)
class Judge:
    """Implements ports.Reward: a number that follows from the tokens, after the time that the slowest of the group takes."""

    latency: bool

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        if self.latency:
            factors = np.exp(random(group[0].key.ordinal, 0, 0).standard_normal(len(group)))
            await asyncio.sleep(min(float(LATENCY_S * factors.max()), SLOWEST_S))
        return [RewardResult(float(episode.samples[0].tokens.sum() % 7) / 7) for episode in group]

    async def close(self) -> None: ...


class Averaging(TorchEngine):
    """Averages gradients over the processes before each step."""

    def step(self) -> Metrics:
        for parameter in self.decoder.parameters():
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
        return super().step()


def recipe(case: Case, updates: int, directory: Path) -> Recipe:
    shape = ShapeSection(hidden_size=160, intermediate_size=480, num_layers=4, num_heads=4, num_kv_heads=2, max_positions=512)
    return Recipe(
        model=ModelSection(new=shape),
        data=DataSection(train=DatasetSection(task="arithmetic", size=512)),
        run=RunSection(dir=directory, threads=case.threads),
        algorithm=AlgorithmSection("grpo", {"aggregation": "token-mean", "bypass": True}),
        rollout=RolloutConfig(groups_per_step=GROUPS // case.ranks, group_size=SIZE),
        engine=NativeConfig(slots=GROUPS * SIZE // case.ranks, max_context=PROMPT + LONGEST),
        train=TrainConfig(lr=1e-4),
        trainer=TrainerSection(WARM + updates, case.mode, None if case.mode == "sync" else 2),
        runtime=RuntimeConfig("process", pools={"trainer": 1}) if case.mode == "separate_async" else RuntimeConfig(),
    )


# ----------------------------------------------------------------------------------------------------- one case


def cpu_s() -> tuple[float, float]:
    """Processor time of this process, which generates, and of those below it, which train where there are any."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(path.parent.name)
        parents[pid], spent[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def below(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and below(parents[pid]))

    own = spent.pop(os.getpid())
    return own, sum(seconds for pid, seconds in spent.items() if below(pid))


@dataclass
class Record:
    """The loop's tracker and hooks: what is measured of the updates after the first WARM."""

    engine: NativeEngine
    metrics: Metrics = field(default_factory=Metrics)
    begun: tuple[float, tuple[float, float]] = (0.0, (0.0, 0.0))

    def log(self, metrics: Metrics, step: int) -> None:
        if step > WARM:
            self.metrics += metrics

    async def after_step(self, policy: PolicyRef, metrics: Metrics) -> None:
        del metrics
        if policy.version == WARM:
            self.engine.metrics()  # since the last call
            self.begun = time.perf_counter(), cpu_s()

    def state(self) -> dict[str, Json]:
        return {}

    def restore(self, state: Mapping[str, Json]) -> None: ...

    def close(self) -> None: ...


async def measure(case: Case, updates: int, rank: int, directory: Path) -> dict[str, float]:
    chosen = recipe(case, updates, directory)
    model = build_model(chosen)
    assert model.probed is not None
    engine = NativeEngine(model.decoder, model.renderer.text, chosen.engine, exact=model.probed.exact)  # type: ignore[arg-type]

    def make_llm(key: Key, seed: int, params: SamplingParams) -> LLM:
        return Session(engine, model.renderer, key, params, seed=seed, max_context=chosen.engine.max_context)

    rollout = Rollout(engine, ForcedLengths((rank, case.ranks)), make_llm, Judge(case.latency), None)
    phase, record, initial = main_phase(chosen, model, rollout, directory / "logs"), Record(engine), directory / "initial"
    if phase.copies_policy:
        model.save(initial)
    async with phase.workers:
        await phase.begin(initial)
        await loop.train(phase.source, phase.plan, phase.learner, phase.checkpoint, record, record, steps=phase.steps)
        wall_s = time.perf_counter() - record.begun[0]
        here_s, below_s = (now - then for now, then in zip(cpu_s(), record.begun[1], strict=True))
    samples = updates * GROUPS * SIZE // case.ranks
    found = {"samples_per_s": samples / wall_s, "cpu_ms_per_sample": 1000 * (here_s + below_s) / samples}
    found |= {"cpu_s_here": here_s / updates, "cpu_s_below": below_s / updates}
    metrics = record.metrics + engine.metrics().prefixed("engine")
    await engine.close()
    wanted = {name: metric for name, metric in metrics.items() if name.startswith(("time/", "engine/", "staleness/", "mismatch/"))}
    return found | {name: metric.value / (updates if metric.reduction == "sum" else 1) for name, metric in wanted.items()}


def run_case(name: str, updates: int, rank: int, meet: str | None) -> dict[str, float]:
    case = CASES[name]
    if meet is not None:
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=case.ranks)
        tandem.assemble.workers.TorchEngine = Averaging  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(case, updates, rank, Path(directory)))
    if meet is not None:
        dist.destroy_process_group()
    return found


# -------------------------------------------------------------------------------------------------- all of them


def in_processes(name: str, updates: int) -> dict[str, float]:
    """The case in processes of its own; of several, their sum of samples and their mean of everything else."""
    ranks = CASES[name].ranks
    environment = os.environ | {"OMP_NUM_THREADS": str(CASES[name].threads)}
    with tempfile.TemporaryDirectory() as directory:
        meet = ["--meet", f"{directory}/meet"] if ranks > 1 else []
        commands = [
            [sys.executable, __file__, "--case", name, "--updates", str(updates), "--rank", str(i), *meet] for i in range(ranks)
        ]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for command in commands]
        outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"case {name} failed")
    found: list[dict[str, float]] = [json.loads(output.splitlines()[-1]) for output in outputs]
    mean = {key: statistics.mean(each[key] for each in found) for key in found[0]}
    return mean | {"samples_per_s": sum(each["samples_per_s"] for each in found)}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--updates", type=int, default=12, help="that are measured in each case; half of it with latency")
    options.add_argument("--json", type=Path, help="where the last line goes, too")
    options.add_argument("--case", choices=sorted(CASES))
    options.add_argument("--rank", type=int, default=0)
    options.add_argument("--meet")
    given = options.parse_args()
    if given.case is not None:
        print(json.dumps(run_case(given.case, given.updates, given.rank, given.meet)))
        return 0
    rounds: list[dict[str, dict[str, float]]] = []
    load = os.getloadavg()[0]  # before this one's own
    for index in range(given.rounds):
        found = rounds.append({}) or rounds[-1]
        for name, case in CASES.items():
            found[name] = in_processes(name, max(3, given.updates // 2) if case.latency else given.updates)
            print(index, name, {key: round(value, 3) for key, value in found[name].items()}, file=sys.stderr)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, dict[str, float]] = {}
    for claim in CLAIMS:
        rates = [{name: each["samples_per_s"] for name, each in found.items()} for found in rounds]
        found = [each[claim.case] / max(each[name] for name in claim.against) for each in rates]
        rows.append(row(f"{claim.mode}, {claim.name}", " or ".join(claim.against), found, claim.floor, claim.stretch))
        ratios.setdefault(claim.mode, {})[claim.name] = rows[-1]["ratio"]
    medians = {
        name: {key: round(statistics.median(found[name][key] for found in rounds), 3) for key in rounds[0][name]} for name in CASES
    }
    result = {"benchmark": "modes", "machine": machine(), "load": round(load, 1), "num_rounds": given.rounds}
    result |= {"updates": given.updates, "cases": medians}
    line = json.dumps(result | {"rows": rows, "ratio_to_sync": ratios})
    if given.json is not None:
        given.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0 if all(row["pass"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
